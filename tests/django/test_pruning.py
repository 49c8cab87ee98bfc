"""Pruning: only ledger rows that no check will ask for, and inbox rows of their age."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from io import StringIO
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import F

from outbox import Decision, Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from outbox.broker.operations.deletion import delete_group
from outbox.contrib.django import publish, run_check_back, run_prune, subscriber
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger import ledger, pruning
from outbox.contrib.django.ledger.pruning import PruneCounts, first_id_at, prune_ledgers
from outbox.contrib.django.models import InboxEntry, LedgerIdentity
from outbox.contrib.django.worker import periodic
from outbox.contrib.django.worker.workers import consumer_runtime, run_check_role
from outbox.errors import BrokerUnavailable
from outbox.utils.ids import uuid7
from tests.django.broker_world import NOWHERE
from tests.django.conftest import point_alias
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect
from tests.django.state import decisions, rolled_back
from tests.django.support import broker_sql, sequence
from tests.django.test_barrier import answers, check, row
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log")


def test_only_what_the_broker_shows_decided_is_pruned_and_nothing_older_is_guessed() -> None:
    with transaction.atomic():
        decided = publish("orders", {}, key="decided")
    flush(within_seconds=5)
    unknown_to_the_broker = uuid7()
    ledger.insert_committed(connections["default"], unknown_to_the_broker)
    assert prune_ledgers(older_than=datetime.now(UTC) - timedelta(hours=1)).ledger == 0
    assert prune_ledgers(older_than=datetime.now(UTC) + timedelta(seconds=5)).ledger == 1
    assert row("default", decided.transaction_id) is None
    assert row("default", unknown_to_the_broker) == "C"
    try:
        answer = answers([check(decided.transaction_id)])[decided.transaction_id]
        assert (answer.decision, answer.counts, answer.alarm) == (Decision.UNKNOWN, True, True)
        assert row("default", decided.transaction_id) is None
        assert answers([check(uuid7())]).popitem()[1].decision is Decision.ROLLBACK
    finally:
        LedgerIdentity.objects.update(pruned_before=None)


def test_rows_of_the_engine_before_are_kept_while_it_may_check_and_delay_no_others(
    outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the oldest, of transactions that this broker has never seen."""
    monkeypatch.setattr(pruning, "_BATCH", 2)
    moment = datetime.now(UTC) - timedelta(hours=2)
    foreign = [UUID(int=first_id_at(moment).int + number) for number in range(4)]
    for one in foreign:
        ledger.insert_committed(connections["default"], one)
    with transaction.atomic():
        decided = publish("orders", {}, key="decided")
    flush(within_seconds=5)
    later = datetime.now(UTC) + timedelta(seconds=5)
    try:
        assert sum(prune_ledgers(older_than=later, max_seconds=0).ledger for _ in range(3)) == 1
        assert row("default", decided.transaction_id) is None
        assert {row("default", one) for one in foreign} == {"C"}
        outbox_settings(INBOX_RETENTION_SECONDS=3600)
        assert prune_ledgers(older_than=later).ledger == 4
    finally:
        LedgerIdentity.objects.update(pruned_before=None)


def test_pruning_stops_before_what_is_too_young_for_the_barrier(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(IMMUNITY_SECONDS=60)
    with rolled_back():
        young = publish("orders", {}, key="open")
    with transaction.atomic():
        publish("orders", {}, key="later")
    flush(within_seconds=5)
    assert prune_ledgers(older_than=datetime.now(UTC) + timedelta(seconds=5)).ledger == 0
    assert row("default", young.transaction_id) is None


def test_pruning_runs_the_barrier_for_halves_that_are_still_to_be_checked() -> None:
    with rolled_back():
        dropped = publish("orders", {}, key="open")
    with transaction.atomic():
        publish("orders", {}, key="later")
    flush(within_seconds=5)
    try:
        assert prune_ledgers(older_than=datetime.now(UTC) + timedelta(seconds=5)).ledger == 1
        assert row("default", dropped.transaction_id) == "R"
        assert run_check_back().rolled_back == 1
        assert prune_ledgers(older_than=datetime.now(UTC) + timedelta(seconds=5)).ledger == 1
    finally:
        LedgerIdentity.objects.update(pruned_before=None)


def test_the_inbox_is_pruned_by_age() -> None:
    now = datetime.now(UTC)
    for days in (1, 13, 15, 30):
        InboxEntry.objects.create(group="g", generation=1, message_id=uuid7(), handled_at=now - timedelta(days=days))
    assert run_prune(now=now).inbox == 2
    assert InboxEntry.objects.count() == 2


def test_ids_are_ordered_like_time() -> None:
    before = first_id_at(datetime.now(UTC) - timedelta(milliseconds=5))
    middle = uuid7()
    after = first_id_at(datetime.now(UTC) + timedelta(milliseconds=5))
    assert before < middle < after
    assert str(before)[14] == "7"


# -- the inbox --------------------------------------------------------------------------------------


LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def _effects(databases: None, no_subscribers: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)


def consume(keys: Sequence[str]) -> None:
    for key in keys:
        publish("orders", {}, key=key, at_once=True)
    sequence()
    consumer_runtime().run_once()


def handled_long_ago(days: float = 20) -> None:
    InboxEntry.objects.update(handled_at=F("handled_at") - timedelta(days=days))


def old_rows(group: str, count: int) -> list[UUID]:
    ids = [uuid7() for _ in range(count)]
    InboxEntry.objects.bulk_create(
        InboxEntry(group=group, generation=1, message_id=one, handled_at=LONG_AGO + timedelta(seconds=number // 3))
        for number, one in enumerate(ids)
    )
    return ids


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_effects")
def test_a_group_that_was_stopped_for_longer_than_the_inbox_keeps_its_rows_handles_nothing_twice() -> None:
    consume(["one", "two", "three"])
    handled_long_ago()
    run_prune()
    # As after a failover that lost the newest offsets: the queue begins again where it stopped.
    call_command("outbox_group", "reset", "effects", "orders", "--to-earliest", stdout=StringIO())
    consumer_runtime().run_once()
    assert Effect.objects.count() == 3


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_effects")
def test_rows_go_with_the_messages_of_the_log() -> None:
    consume(["one", "two"])
    handled_long_ago()
    assert run_prune().inbox == 0
    broker_sql("UPDATE outbox.commit_log SET stored_at = stored_at - interval '20 days'")
    with broker_connection() as (connection, schema):
        assert retention.run_once(Executor(connection, schema)).messages == 2
    assert run_prune().inbox == 2


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_effects")
def test_a_deleted_group_and_an_older_generation_keep_nothing() -> None:
    consume(["one", "two"])
    handled_long_ago()
    broker_sql("UPDATE outbox.consumer_group SET generation = 2")
    assert run_prune().inbox == 2
    broker_sql("UPDATE outbox.consumer_group SET generation = 1")
    consume(["three"])
    handled_long_ago()
    with broker_connection() as (connection, schema):
        delete_group(Executor(connection, schema), "effects")
    assert run_prune().inbox == 1


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_a_broker_that_is_away_prunes_nothing() -> None:
    old_rows("effects", 3)
    point_alias("broker", NOWHERE)
    with pytest.raises(BrokerUnavailable):
        run_prune()
    assert InboxEntry.objects.count() == 3


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_a_backlog_is_removed_to_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_BATCH", 2)
    old_rows("effects", 250)
    counts = run_prune()
    assert counts.inbox == 250
    assert not counts.more


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_effects")
def test_rows_that_stay_do_not_hold_up_those_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of one moment than a batch takes, too."""
    monkeypatch.setattr(pruning, "_BATCH", 2)
    consume([f"k{number}" for number in range(7)])
    InboxEntry.objects.update(handled_at=LONG_AGO - timedelta(days=1))
    old_rows("gone", 9)
    turns: list[PruneCounts] = []
    while not turns or turns[-1].more:
        turns.append(run_prune(max_seconds=0))
    assert sum(turn.inbox for turn in turns) == 9
    assert len(turns) > 5
    assert set(InboxEntry.objects.values_list("group", flat=True)) == {"effects"}


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.slow
def test_a_worker_continues_with_a_backlog_at_once_and_runs_check_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch, outbox_settings: Callable[..., None]
) -> None:
    monkeypatch.setattr(pruning, "_BATCH", 10)
    monkeypatch.setattr(periodic, "PRUNE_TURN_SECONDS", 0.0)
    outbox_settings(CHECK_INTERVAL_SECONDS=0.2, IMMUNITY_SECONDS=0)
    old_rows("gone", 150)
    stop = threading.Event()
    worker = threading.Thread(target=run_check_role, args=[stop])
    worker.start()
    try:
        eventually(lambda: InboxEntry.objects.count() < 150, what="the first turn")
        with rolled_back():
            publish("orders", {}, key="dropped")
        eventually(lambda: decisions() == {"dropped": "R"}, within_seconds=30, what="check-back between the turns")
        eventually(lambda: not InboxEntry.objects.exists(), within_seconds=60, what="the last row")
    finally:
        stop.set()
        worker.join(20)
