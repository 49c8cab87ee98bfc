"""The comparison of ledgers and inboxes with the broker: the losses it counts, and rows that are no loss."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections, transaction

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.maintenance import retention
from outbox.broker.operations.changes import reset
from outbox.broker.operations.deletion import delete_topic
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.pruning import first_id_after, first_id_at, prune_ledgers
from outbox.contrib.django.models import InboxEntry, LedgerIdentity
from outbox.contrib.django.operations.comparing import (
    CompareCounts,
    compare_when_due,
    losses,
    run_compare,
    settle_losses,
)
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import LedgerUnavailable
from outbox.subscription import Start
from outbox.utils.ids import uuid7
from tests.django.sessions import broker_connection
from tests.django.state import execute, renamed
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

NOTHING = CompareCounts()


def _publish(*keys: str, topic: str = "payments", tag: str = "") -> list[UUID]:
    ids = []
    for key in keys:
        with transaction.atomic():
            ids.append(publish(topic, {}, key=key, tag=tag).transaction_id)
    sequence()
    return ids


def _broker(statement: str, *parameters: Any) -> None:
    execute(statement, *parameters, alias="broker")


def _restore_broker_to_before(*ids: UUID) -> None:
    """As a restore does: the rows are gone, and another life begins."""
    _broker("DELETE FROM outbox.op_log WHERE transaction_id = ANY (%s)", list(ids))
    _broker("DELETE FROM outbox.commit_log WHERE message_id = ANY (%s)", list(ids))
    _broker("TRUNCATE outbox.life_sign")


def test_lost_messages_are_counted_until_they_are_known_again_or_settled() -> None:
    kept, lost = _publish("kept"), _publish("lost", "lost too")
    assert run_compare() == NOTHING
    assert compare_when_due() is None
    _restore_broker_to_before(*lost)
    assert compare_when_due() == CompareCounts(lost_messages=2)
    [one] = losses()
    assert (sorted(one.ids), one.subject, one.alias) == (sorted(lost), "shop", "default")
    assert one.first_at and one.last_at and one.first_at <= one.last_at
    assert run_compare() == CompareCounts(lost_messages=2)
    assert settle_losses() == 2
    assert run_compare() == NOTHING
    _restore_broker_to_before(*kept)
    assert run_compare() == CompareCounts(lost_messages=1)


def test_a_ledger_that_is_gone_does_not_agree_with_the_broker() -> None:
    """The database was replaced by one without the tables, or its search path changed."""
    _publish("kept")
    assert run_compare() == NOTHING
    with renamed("outbox_ledger", "outbox_ledger_identity"):
        with pytest.raises(LedgerUnavailable, match=r"'default': relation \"outbox_ledger"):
            run_compare()
    assert run_compare() == NOTHING


def test_a_pruned_ledger_names_the_span_that_is_unknown() -> None:
    lost = _publish("lost")
    later = datetime.now(UTC) + timedelta(seconds=5)
    try:
        assert prune_ledgers(older_than=later).ledger == 1
        _restore_broker_to_before(*lost)
        assert run_compare() == NOTHING
        [one] = losses()
        assert one.unproven_from and one.unproven_to and one.unproven_from < one.unproven_to
        assert run_compare() == NOTHING and losses()
        settle_losses()
        assert losses() == []
    finally:
        LedgerIdentity.objects.update(pruned_before=None)


def test_a_topic_that_was_deleted_and_is_declared_again_lost_nothing() -> None:
    _publish("known")
    assert run_compare() == NOTHING
    with broker_executor() as run:
        delete_topic(run, "payments")
        retention.run_once(run)
        declare_topics(run, [get_settings().topics["payments"].topic])
    assert run_compare() == NOTHING


def test_what_the_broker_need_not_know_is_no_loss(outbox_settings: Callable[..., None]) -> None:
    """Rows of the engine before, rows past the retention of messages, and rows of a deleted topic."""
    _publish("known")
    _broker("UPDATE outbox.broker SET created_at = now() - interval '1 hour'")
    ledger.insert_committed(connections["default"], first_id_at(datetime.now(UTC) - timedelta(hours=2)))
    assert run_compare() == NOTHING
    _broker("UPDATE outbox.topic SET retention_seconds = 600 WHERE name = 'payments'")
    ledger.insert_committed(connections["default"], first_id_at(datetime.now(UTC) - timedelta(minutes=30)))
    assert run_compare() == NOTHING
    ledger.insert_committed(connections["default"], uuid7())
    _broker("UPDATE outbox.topic SET deleted_at = now() + interval '1 second' WHERE name = 'orders'")
    assert run_compare() == NOTHING


def test_commits_that_the_ledger_lacks_are_counted_unless_they_were_pruned() -> None:
    first, second = _publish("first", "second")
    assert run_compare() == NOTHING
    with connections["default"].cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        cursor.execute("DELETE FROM outbox_ledger")
        cursor.execute("RESET session_replication_role")
    try:
        LedgerIdentity.objects.update(pruned_before=first_id_after(min(first, second)))
        assert run_compare() == CompareCounts(lost_commits=1)
        ledger.insert_committed(connections["default"], max(first, second))
        assert run_compare() == NOTHING
    finally:
        LedgerIdentity.objects.update(pruned_before=None)


def test_vanished_effects_are_counted_and_a_reset_brings_them_back() -> None:
    handled: list[str] = []

    @subscriber("payments", group="effects")
    def effect(delivery: Delivery) -> None:
        handled.append(delivery.key)

    _publish(*(f"k{number}" for number in range(6)))
    consumer_runtime().run_once()
    assert run_compare() == NOTHING
    _publish("k6")
    consumer_runtime().run_once()
    newest = InboxEntry.objects.order_by("-handled_at").values_list("message_id", flat=True)[:3]
    InboxEntry.objects.filter(message_id__in=list(newest)).delete()
    assert run_compare() == CompareCounts(lost_effects=3)
    assert run_compare() == CompareCounts(lost_effects=3)
    [one] = losses()
    assert one.first_at is not None
    with broker_connection() as (connection, schema):
        reset(Executor(connection, schema), "effects", "payments", one.first_at - timedelta(milliseconds=1))
    assert run_compare() == NOTHING
    consumer_runtime().run_once()
    assert len(handled) == 10
    assert run_compare() == NOTHING


def test_vanished_effects_of_messages_that_a_reset_brought_back_are_counted() -> None:
    """An earlier reset had skipped them, so that the comparison ignored them."""
    handled: list[str] = []

    @subscriber("payments", group="effects")
    def effect(delivery: Delivery) -> None:
        handled.append(delivery.key)

    _publish("k0")
    consumer_runtime().run_once()
    assert run_compare() == NOTHING
    _publish("k1", "k2", "k3")
    with broker_connection() as (connection, schema):
        reset(Executor(connection, schema), "effects", "payments", Start.LATEST)
    consumer_runtime().run_once()
    assert run_compare() == NOTHING
    with broker_connection() as (connection, schema):
        reset(Executor(connection, schema), "effects", "payments", 1)
    consumer_runtime().run_once()
    assert set(handled) - {"k0"}, "some are handled only now"
    skipped = len(set(handled) - {"k0"})
    assert run_compare() == NOTHING
    InboxEntry.objects.all().delete()
    assert run_compare().lost_effects >= skipped


def test_a_new_group_that_starts_at_the_end_has_lost_nothing_before_it() -> None:
    """A comparison has run before the group had a position."""

    @subscriber("payments", group="effects", start="latest")
    def effect(delivery: Delivery) -> None: ...

    _publish("before")
    assert run_compare() == NOTHING
    consumer_runtime().run_once()
    _publish("after")
    consumer_runtime().run_once()
    assert run_compare() == NOTHING
    InboxEntry.objects.all().delete()
    assert run_compare() == CompareCounts(lost_effects=1)


def test_what_has_no_inbox_row_for_a_reason_is_no_loss() -> None:
    """Filtered out, given up, passed over by a reset, handled before the first comparison."""

    @subscriber(
        "payments", group="effects", tag="wanted", on_error={ValueError: "retry_later", KeyError: "dead_letter"}
    )
    def effect(delivery: Delivery) -> None:
        if delivery.key == "skipped":
            raise ValueError
        if delivery.key == "dead":
            raise KeyError

    _publish("before", tag="wanted")
    consumer_runtime().run_once()
    InboxEntry.objects.all().delete()
    assert run_compare() == NOTHING
    _publish("good", "skipped", "dead", tag="wanted")
    _publish("unwanted", tag="other")
    consumer_runtime().run_once()
    assert run_compare() == NOTHING
    _publish("passed over", tag="wanted")
    with broker_connection() as (connection, schema):
        reset(Executor(connection, schema), "effects", "payments", Start.LATEST)
    assert run_compare() == NOTHING
    _publish("after", tag="wanted")
    consumer_runtime().run_once()
    assert run_compare() == NOTHING
