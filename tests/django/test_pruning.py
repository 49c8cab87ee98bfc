"""Pruning: only ledger rows that no check will ask for, and inbox rows of their age."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from django.db import connections, transaction

from outbox import Decision
from outbox.contrib.django import publish, run_check_back, run_prune
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger import ledger, pruning
from outbox.contrib.django.ledger.pruning import first_id_at, prune_ledgers
from outbox.contrib.django.models import InboxEntry, LedgerIdentity
from outbox.utils.ids import uuid7
from tests.django.state import rolled_back
from tests.django.test_barrier import answers, check, row

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
