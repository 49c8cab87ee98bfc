"""The ledger answers for the transactions that it must still have, and for no others: emptied, deleted from, pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from importlib import import_module
from uuid import UUID

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections, transaction
from django.db.utils import IntegrityError

from outbox import Check, Decision
from outbox.broker.database.executor import Executor
from outbox.broker.transaction.checks import find_undecided, scan
from outbox.contrib.django import message, publish, publish_messages, run_check_back
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker, answer_by_ledger, open_connection
from outbox.contrib.django.ledger.pruning import prune_ledgers
from outbox.contrib.django.models import LedgerEntry, LedgerIdentity
from outbox.contrib.django.settings.conf import get_settings
from outbox.utils.ids import uuid7
from tests.django.shop.models import Order
from tests.django.state import decisions, incidents, rolled_back
from tests.django.support import end_messages_lost
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log")


@pytest.fixture(params=["default", "lite"])
def alias(request: pytest.FixtureRequest) -> str:
    """PostgreSQL and SQLite."""
    return str(request.param)


def order_paid(alias: str, key: str) -> UUID:
    """A committed order whose end message is lost; its transaction id."""
    with end_messages_lost(), transaction.atomic(using=alias):
        Order.objects.using(alias).create(number=key)
        receipt = publish("orders", {}, key=key, using=alias)
    return receipt.transaction_id


def execute(alias: str, statement: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)


def asked_again(transaction_id: UUID) -> Decision:
    """The answer of the project's checker about an undecided half, parked or not."""
    with broker_connection() as (broker, schema):
        half = find_undecided(Executor(broker, schema), transaction_id)
    assert half is not None
    return next(iter(LedgerChecker().check_local_transactions([half]))).decision


# -- rows that go early ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "emptying"),
    [("default", "TRUNCATE outbox_ledger"), ("lite", "DELETE FROM outbox_ledger")],
)
def test_an_emptied_ledger_is_another_ledger_and_rolls_nothing_back(alias: str, emptying: str) -> None:
    order_paid(alias, "before")
    execute(alias, emptying)
    order_paid(alias, "after")
    counts = run_check_back()
    assert decisions() == {"before": None, "after": "C"}
    assert (counts.unknown, counts.rolled_back) == (1, 0)
    assert [kind for kind, _ in incidents()] == ["wrong_ledger"]


def test_a_flush_is_as_good_as_a_new_database(alias: str) -> None:
    order_paid(alias, "before")
    call_command("flush", database=alias, interactive=False, verbosity=0)
    order_paid(alias, "after")
    run_check_back()
    assert decisions() == {"before": None, "after": "C"}


def test_postgresql_refuses_to_delete_what_is_not_pruned() -> None:
    paid = order_paid("default", "paid")
    with pytest.raises(IntegrityError, match=r"(?s)outbox_ledger.*may still be asked about.*TRUNCATE"):
        execute("default", "DELETE FROM outbox_ledger")
    with pytest.raises(IntegrityError):
        LedgerEntry.objects.filter(pk=paid).delete()
    run_check_back()
    assert decisions() == {"paid": "C"}


def test_what_is_below_the_pruned_id_may_be_deleted_by_hand(alias: str) -> None:
    identity = LedgerIdentity.objects.using(alias).get()
    old = uuid7()
    ledger.insert_committed(connections[alias], old)
    ledger.advance_pruned_before(connections[alias], uuid7())
    try:
        assert LedgerEntry.objects.using(alias).filter(pk=old).delete()[0] == 1
        assert LedgerIdentity.objects.using(alias).get().ledger_id == identity.ledger_id
    finally:
        LedgerIdentity.objects.using(alias).update(pruned_before=None)


def test_a_ledger_that_changes_between_identity_and_tombstone_gets_no_tombstone(alias: str) -> None:
    """The checker has found its ledger; then the ledger is emptied, and the checker continues."""
    paid = order_paid(alias, "paid")
    with broker_connection() as (broker, schema):
        half = find_undecided(Executor(broker, schema), paid)
    assert half is not None
    execute(alias, "TRUNCATE outbox_ledger" if alias == "default" else "DELETE FROM outbox_ledger")
    assert answered_late(alias, half) is Decision.UNKNOWN
    assert not LedgerEntry.objects.using(alias).exists()


def test_a_ledger_that_is_pruned_between_identity_and_tombstone_gets_no_tombstone(
    alias: str, pruned_nothing_yet: None
) -> None:
    with rolled_back(using=alias):
        dropped = publish("orders", {}, key="dropped", using=alias).transaction_id
    with broker_connection() as (broker, schema):
        half = find_undecided(Executor(broker, schema), dropped)
    assert half is not None
    ledger.advance_pruned_before(connections[alias], uuid7())
    assert answered_late(alias, half) is Decision.UNKNOWN
    assert not LedgerEntry.objects.using(alias).exists()


def test_a_tombstone_that_waited_for_a_truncate_is_not_written() -> None:
    paid = order_paid("default", "paid")
    with broker_connection() as (broker, schema):
        half = find_undecided(Executor(broker, schema), paid)
    assert half is not None
    seen: list[Decision] = []
    with closing(open_connection("default")) as other, ThreadPoolExecutor(1) as pool:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("TRUNCATE outbox_ledger")
            asking = pool.submit(lambda: seen.append(answered_late("default", half)))
            eventually(waits_for_the_ledger, within_seconds=10, what="the checker waits for the TRUNCATE")
            cursor.execute("COMMIT")
        asking.result(20)
    assert seen == [Decision.UNKNOWN]
    assert not LedgerEntry.objects.exists()


def answered_late(alias: str, half: Check) -> Decision:
    with closing(open_connection(alias)) as connection:
        return next(iter(answer_by_ledger(connection, [half]))).decision


def waits_for_the_ledger() -> bool:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox_ledger'::regclass")
        return bool(cursor.fetchone()[0])


def test_the_guard_can_be_taken_away_and_back(alias: str) -> None:
    migration = import_module("outbox.contrib.django.migrations.0001_initial")
    with connections[alias].schema_editor() as editor:
        migration.leave_unguarded(apps, editor)
    try:
        before = LedgerIdentity.objects.using(alias).get().ledger_id
        ledger.insert_committed(connections[alias], uuid7())
        execute(alias, "DELETE FROM outbox_ledger")
        assert LedgerIdentity.objects.using(alias).get().ledger_id == before
    finally:
        with connections[alias].schema_editor() as editor:
            migration.guard(apps, editor)


# -- pruning --------------------------------------------------------------------------------------------


def parked_half(alias: str, key: str, *, committed: bool) -> UUID:
    """An undecided half without an answer in time."""
    if committed:
        transaction_id = order_paid(alias, key)
    else:
        with rolled_back(using=alias):
            transaction_id = publish("orders", {}, key=key, using=alias).transaction_id
    with broker_connection() as (broker, schema):
        scan(Executor(broker, schema), settings=get_settings().check)
        broker.execute("UPDATE outbox.pending_check SET parked_at = now()")
    return transaction_id


def decided_order(alias: str, key: str) -> UUID:
    with transaction.atomic(using=alias):
        receipt = publish("orders", {}, key=key, using=alias)
    flush(within_seconds=5)
    return receipt.transaction_id


def prune_everything() -> int:
    return prune_ledgers(older_than=datetime.now(UTC) + timedelta(seconds=5)).ledger


@pytest.fixture
def pruned_nothing_yet() -> Iterator[None]:
    """Lets the next test find ledgers that are complete."""
    yield
    for alias in ("default", "lite"):
        LedgerIdentity.objects.using(alias).update(pruned_before=None)


@pytest.mark.parametrize(("committed", "expected"), [(True, Decision.COMMIT), (False, Decision.ROLLBACK)])
def test_a_parked_half_can_be_answered_after_pruning(
    alias: str, committed: bool, expected: Decision, pruned_nothing_yet: None
) -> None:
    parked = parked_half(alias, "parked", committed=committed)
    later = decided_order(alias, "later")
    assert prune_everything() == 1
    assert not LedgerEntry.objects.using(alias).filter(pk=later).exists()
    assert asked_again(parked) is expected


def test_pruning_stops_below_a_parked_half_that_is_still_running(pruned_nothing_yet: None) -> None:
    earlier = decided_order("default", "earlier")
    with ExitStack() as from_commit_on, transaction.atomic():
        running = publish("orders", {}, key="running").transaction_id
        with broker_connection() as (broker, schema):
            scan(Executor(broker, schema), settings=get_settings().check)
            broker.execute("UPDATE outbox.pending_check SET parked_at = now()")
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(in_own_connection, lambda: decided_order("default", "later")).result(20)
            assert pool.submit(in_own_connection, prune_everything).result(20) == 1
        from_commit_on.enter_context(end_messages_lost())
    assert set(LedgerEntry.objects.values_list("pk", flat=True)) == {running, later}
    assert earlier < running
    assert asked_again(running) is Decision.COMMIT


@pytest.mark.parametrize(("committed", "decision"), [(True, "C"), (False, None)])
def test_a_half_that_arrives_below_the_pruned_id_is_never_rolled_back_by_guessing(
    alias: str, committed: bool, decision: str | None, pruned_nothing_yet: None
) -> None:
    late = message("orders", {}, key="late")
    decided_order(alias, "decided")
    assert prune_everything() == 1
    with end_messages_lost(), transaction.atomic(using=alias):
        publish_messages([late], using=alias)
        transaction.set_rollback(not committed, using=alias)
    run_check_back()
    assert decisions() == {"decided": "C", "late": decision}
    assert [kind for kind, _ in incidents()] == ([] if committed else ["wrong_ledger"])


def in_own_connection(work: Callable[[], object]) -> object:
    try:
        return work()
    finally:
        connections.close_all()


def test_an_undecided_half_of_another_ledger_does_not_hold_up_pruning(pruned_nothing_yet: None) -> None:
    with transaction.atomic(using="lite"):
        publish("orders", {}, key="elsewhere", using="lite")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(in_own_connection, lambda: decided_order("default", "here")).result(20)
            assert pool.submit(in_own_connection, prune_everything).result(20) == 1
