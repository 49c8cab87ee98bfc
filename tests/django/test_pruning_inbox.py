"""Pruning of the inbox: a row stays while its own group can be given the message; and a backlog is worked off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from io import StringIO
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db.models import F

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from outbox.broker.operations.deletion import delete_group
from outbox.contrib.django import publish, run_prune, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.ledger import pruning
from outbox.contrib.django.ledger.pruning import PruneCounts
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.worker import periodic
from outbox.contrib.django.worker.workers import consumer_runtime, run_check_role
from outbox.errors import BrokerUnavailable
from outbox.utils.ids import uuid7
from tests.django.broker_world import NOWHERE
from tests.django.conftest import point_alias
from tests.django.shop.models import Effect
from tests.django.state import decisions, rolled_back
from tests.django.support import sequence
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

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


def on_broker(statement: str) -> None:
    with broker_connection() as (connection, _):
        connection.execute(statement.encode())


def old_rows(group: str, count: int) -> list[UUID]:
    ids = [uuid7() for _ in range(count)]
    InboxEntry.objects.bulk_create(
        InboxEntry(group=group, generation=1, message_id=one, handled_at=LONG_AGO + timedelta(seconds=number // 3))
        for number, one in enumerate(ids)
    )
    return ids


@pytest.mark.usefixtures("_effects")
def test_a_group_that_was_stopped_for_longer_than_the_inbox_keeps_its_rows_handles_nothing_twice() -> None:
    consume(["one", "two", "three"])
    handled_long_ago()
    run_prune()
    # As after a failover that lost the newest offsets: the queue begins again where it stopped.
    call_command("outbox_group", "reset", "effects", "orders", "--to-earliest", stdout=StringIO())
    consumer_runtime().run_once()
    assert Effect.objects.count() == 3


@pytest.mark.usefixtures("_effects")
def test_rows_go_with_the_messages_of_the_log() -> None:
    consume(["one", "two"])
    handled_long_ago()
    assert run_prune().inbox == 0
    on_broker("UPDATE outbox.commit_log SET stored_at = stored_at - interval '20 days'")
    with broker_connection() as (connection, schema):
        assert retention.run_once(Executor(connection, schema)).messages == 2
    assert run_prune().inbox == 2


@pytest.mark.usefixtures("_effects")
def test_a_deleted_group_and_an_older_generation_keep_nothing() -> None:
    consume(["one", "two"])
    handled_long_ago()
    on_broker("UPDATE outbox.consumer_group SET generation = 2")
    assert run_prune().inbox == 2
    on_broker("UPDATE outbox.consumer_group SET generation = 1")
    consume(["three"])
    handled_long_ago()
    with broker_connection() as (connection, schema):
        delete_group(Executor(connection, schema), "effects")
    assert run_prune().inbox == 1


def test_a_broker_that_is_away_prunes_nothing() -> None:
    old_rows("effects", 3)
    point_alias("broker", NOWHERE)
    with pytest.raises(BrokerUnavailable):
        run_prune()
    assert InboxEntry.objects.count() == 3


def test_a_backlog_is_removed_to_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_BATCH", 2)
    old_rows("effects", 250)
    counts = run_prune()
    assert counts.inbox == 250
    assert not counts.more


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
