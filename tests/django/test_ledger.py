"""The ledger answers for the transactions that it must still have, and for no others: emptied, deleted from, pruned."""

from __future__ import annotations

from collections.abc import Iterator
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
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker, answer_by_ledger, open_connection
from outbox.contrib.django.ledger.pruning import prune_ledgers
from outbox.contrib.django.models import LedgerEntry, LedgerIdentity
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError
from outbox.utils.ids import uuid7
from tests.django.sessions import broker_connection
from tests.django.shop.models import Order
from tests.django.state import decisions, incidents, rolled_back
from tests.django.support import end_messages_lost
from tests.django.threads import in_thread
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


def half_of(transaction_id: UUID) -> Check:
    """The half of an undecided transaction, parked or not."""
    with broker_connection() as (broker, schema):
        half = find_undecided(Executor(broker, schema), transaction_id)
    assert half is not None
    return half


def asked_again(transaction_id: UUID) -> Decision:
    """The answer of the project's checker about an undecided half."""
    return next(iter(LedgerChecker().check_local_transactions([half_of(transaction_id)]))).decision


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
    half = half_of(order_paid(alias, "paid"))
    execute(alias, "TRUNCATE outbox_ledger" if alias == "default" else "DELETE FROM outbox_ledger")
    assert answered_late(alias, half) is Decision.UNKNOWN
    assert not LedgerEntry.objects.using(alias).exists()


def test_a_ledger_that_is_pruned_between_identity_and_tombstone_gets_no_tombstone(
    alias: str, pruned_nothing_yet: None
) -> None:
    with rolled_back(using=alias):
        dropped = publish("orders", {}, key="dropped", using=alias).transaction_id
    half = half_of(dropped)
    ledger.advance_pruned_before(connections[alias], uuid7())
    assert answered_late(alias, half) is Decision.UNKNOWN
    assert not LedgerEntry.objects.using(alias).exists()


def test_a_tombstone_that_waited_for_a_truncate_is_not_written() -> None:
    half = half_of(order_paid("default", "paid"))
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
        later = in_thread(lambda: decided_order("default", "later"))
        assert in_thread(prune_everything) == 1
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


def test_an_undecided_half_of_another_ledger_does_not_hold_up_pruning(pruned_nothing_yet: None) -> None:
    with transaction.atomic(using="lite"):
        publish("orders", {}, key="elsewhere", using="lite")
        in_thread(lambda: decided_order("default", "here"))
        assert in_thread(prune_everything) == 1


# -- which ledger a search path leads to ------------------------------------------------------------


@pytest.fixture
def tenant() -> Iterator[str]:
    """A schema with a ledger of its own beside the one in `public`."""
    statements = (
        "CREATE SCHEMA tenant",
        "CREATE TABLE tenant.outbox_ledger (LIKE public.outbox_ledger INCLUDING ALL)",
        "CREATE TABLE tenant.outbox_ledger_identity (LIKE public.outbox_ledger_identity INCLUDING ALL)",
        "INSERT INTO tenant.outbox_ledger_identity (singleton, ledger_id) VALUES (true, gen_random_uuid())",
    )
    for statement in statements:
        execute("default", statement)
    yield "tenant"
    connections["default"].close()
    execute("default", "DROP SCHEMA tenant CASCADE")


def test_a_ledger_that_only_the_search_path_of_a_request_reaches_is_refused(tenant: str) -> None:
    order_paid("default", "shared")
    execute("default", f"SET search_path = {tenant}, public")
    with pytest.raises(ConfigurationError, match=r"search_path.*'default'.*only in one schema"):
        order_paid("default", "tenant's")
    execute("default", "SET search_path = public")
    order_paid("default", "shared again")
    run_check_back()
    assert decisions() == {"shared": "C", "shared again": "C"}
    assert set(Order.objects.values_list("number", flat=True)) == {"shared", "shared again"}


@pytest.mark.parametrize("table", ["outbox_ledger", "outbox_ledger_identity"])
def test_half_a_ledger_in_the_schema_of_a_tenant_is_refused(tenant: str, table: str) -> None:
    execute("default", f"DROP TABLE {tenant}.{table}")
    order_paid("default", "shared")
    execute("default", f"SET search_path = {tenant}, public")
    with pytest.raises(ConfigurationError, match="search_path"):
        order_paid("default", "tenant's")
    execute("default", "SET search_path = public")
    run_check_back()
    assert decisions() == {"shared": "C"}


def test_a_shared_ledger_serves_every_search_path(tenant: str) -> None:
    for table in ("outbox_ledger", "outbox_ledger_identity"):
        execute("default", f"DROP TABLE {tenant}.{table}")
    execute("default", f"SET search_path = {tenant}, public")
    order_paid("default", "tenant's")
    run_check_back()
    assert decisions() == {"tenant's": "C"}


@pytest.fixture
def alias_of_a_schema() -> Iterator[str]:
    """An alias whose connections find a schema of their own, migrated as any other database."""
    execute("default", "CREATE SCHEMA branch")
    before = dict(connections.settings["other"])
    own = {**connections.settings["default"], "OPTIONS": {"options": "-c search_path=branch"}}
    connections["other"].close()
    for settings in (connections.settings["other"], connections["other"].settings_dict):
        settings.update(own)
    call_command("migrate", database="other", run_syncdb=True, verbosity=0)
    yield "other"
    connections["other"].close()
    for settings in (connections.settings["other"], connections["other"].settings_dict):
        settings.clear()
        settings.update(before)
    execute("default", "DROP SCHEMA branch CASCADE")


def test_an_alias_for_each_schema_has_a_ledger_of_its_own(alias_of_a_schema: str) -> None:
    order_paid(alias_of_a_schema, "branch's")
    run_check_back()
    assert decisions() == {"branch's": "C"}
    assert not LedgerEntry.objects.exists()
    assert LedgerEntry.objects.using(alias_of_a_schema).count() == 1


def test_each_schema_guards_its_own_ledger(alias_of_a_schema: str) -> None:
    def ids() -> list[UUID]:
        return [LedgerIdentity.objects.using(alias).get().ledger_id for alias in ("default", alias_of_a_schema)]

    shared, own = ids()
    execute("default", "TRUNCATE branch.outbox_ledger")
    assert ids()[0] == shared
    assert ids()[1] != own
    order_paid(alias_of_a_schema, "branch's")
    with pytest.raises(IntegrityError, match="may still be asked about"):
        execute("default", "DELETE FROM branch.outbox_ledger")


def test_the_path_can_change_between_two_publish_calls_of_one_transaction(tenant: str) -> None:
    with end_messages_lost(), transaction.atomic():
        publish("orders", {}, key="first")
        execute("default", f"SET LOCAL search_path = {tenant}, public")
        with pytest.raises(ConfigurationError, match="search_path"):
            publish("orders", {}, key="second")
    run_check_back()
    assert decisions() == {"first": "R"}


def test_a_known_ledger_is_not_looked_up_again_and_a_failing_look_up_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order_paid("default", "first")
    settings = connections.settings["default"]
    name, settings["NAME"] = settings["NAME"], "not-there"
    try:
        order_paid("default", "second")
        assert "could not be read on another connection" not in caplog.text
        execute("default", "TRUNCATE outbox_ledger")
        order_paid("default", "third")
        assert "could not be read on another connection" in caplog.text
    finally:
        settings["NAME"] = name
    run_check_back()
    assert decisions() == {"first": None, "second": None, "third": "C"}
