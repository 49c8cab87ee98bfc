"""MariaDB as an application's database: what differs from PostgreSQL and SQLite (`.ci/matrix mariadb`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.core.checks import run_checks
from django.db import IntegrityError, OperationalError, connections, transaction

from outbox import Delivery, Message
from outbox.contrib.django import publish, run_check_back, subscriber, transactional_message
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.contrib.django.ledger.pruning import prune_inboxes
from outbox.contrib.django.models import InboxEntry, LedgerEntry, LedgerIdentity
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.errors import HandlerNotStarted, SendFailed, TransactionAlreadyRolledBack, TransactionUsageError
from outbox.ports import Disposition
from outbox.utils.ids import uuid7
from tests.django.configured import ON_MARIADB
from tests.django.shop.models import Effect, Order
from tests.django.state import decisions
from tests.django.support import end_messages_lost
from tests.mariadb import PrivateMariaDB
from tests.support import eventually, killed

pytestmark = [
    pytest.mark.skipif(not ON_MARIADB, reason="`.ci/matrix mariadb` runs it, with MariaDB in the place of SQLite"),
    pytest.mark.usefixtures("empty_log", "no_subscribers"),
]

ALIAS = "lite"


def execute(statement: str, *parameters: Any) -> list[Any]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall())


def orders() -> list[str]:
    return sorted(Order.objects.using(ALIAS).values_list("number", flat=True))


def place(number: str) -> UUID:
    Order.objects.using(ALIAS).create(number=number)
    return publish("orders", {}, key=number, using=ALIAS).transaction_id


def deliver(number: str, group: str, message_id: UUID | None = None) -> Any:
    message = Message(topic="orders", body=b"{}", key=number, message_id=message_id or uuid7())
    given: Delivery[Any] = Delivery(message=message, body={}, group=group, queue="orders/0", offset=0)
    found = next(item for item in registry.subscribers() if item.subscription.group == group)
    return InboxInvoker(lease_seconds=2.0)(found.subscription, found.handler, [given], generation=1)[0]


@pytest.fixture(params=["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def isolation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level that the check allows."""
    settings = connections.settings[ALIAS]["OPTIONS"]
    for options in (settings, connections[ALIAS].settings_dict["OPTIONS"]):
        options["isolation_level"] = request.param.lower()
    connections[ALIAS].close()
    yield request.param
    connections[ALIAS].close()
    for options in (settings, connections[ALIAS].settings_dict["OPTIONS"]):
        options["isolation_level"] = "read committed"


# -- transactions --------------------------------------------------------------------------------------


def test_check_back_answers_for_a_lost_end_message(isolation: str) -> None:
    with end_messages_lost():
        with transaction.atomic(using=ALIAS):
            place("paid")
        with transaction.atomic(using=ALIAS):
            place("undone")
            transaction.set_rollback(True, using=ALIAS)
    assert execute("SELECT @@tx_isolation") == [(isolation.replace(" ", "-"),)]
    run_check_back()
    assert (decisions(), orders()) == ({"paid": "C", "undone": "R"}, ["paid"])


def test_a_commit_after_the_tombstone_fails_and_a_running_transaction_is_left_alone(isolation: str) -> None:
    identity = LedgerIdentity.objects.using(ALIAS).get().ledger_id
    absent, running = uuid7(), uuid7()
    with closing(open_connection(ALIAS)) as checker, transaction.atomic(using=ALIAS):
        # The snapshot of REPEATABLE READ is older than the tombstone.
        assert orders() == []
        ledger.insert_committed(connections[ALIAS], running)
        with checker.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 0")
        assert ledger.insert_tombstone(checker, absent, ledger_id=identity)
        with pytest.raises(OperationalError, match="Lock wait timeout"):
            ledger.insert_tombstone(checker, running, ledger_id=identity)
        with pytest.raises(IntegrityError), transaction.atomic(using=ALIAS):
            ledger.insert_committed(connections[ALIAS], absent)
    states = dict(LedgerEntry.objects.using(ALIAS).values_list("transaction_id", "state"))
    assert states == {absent: "R", running: "C"}


def test_a_publishing_transaction_meets_its_tombstone(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = LedgerIdentity.objects.using(ALIAS).get().ledger_id
    insert = ledger.insert_committed

    def late(connection: Any, transaction_id: UUID) -> Any:
        with closing(open_connection(ALIAS)) as checker:
            assert ledger.insert_tombstone(checker, transaction_id, ledger_id=identity)
        return insert(connection, transaction_id)

    monkeypatch.setattr(ledger, "insert_committed", late)
    with pytest.raises(TransactionAlreadyRolledBack), transaction.atomic(using=ALIAS):
        place("late")
    assert orders() == []


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE made (a int)", "TRUNCATE shop_effect", "BEGIN", "SET autocommit = 1"]
)
def test_a_statement_that_commits_is_refused_in_a_decorated_function_and_seen_elsewhere(statement: str) -> None:
    @transactional_message("orders", key="decorated", body={}, using=ALIAS)
    def decorated() -> None:
        Order.objects.using(ALIAS).create(number="decorated")
        place("inner")
        execute(statement)

    @transaction.atomic(using=ALIAS)
    def behind() -> None:
        execute(statement)
        publish("orders", {}, key="behind", using=ALIAS)

    with pytest.raises(TransactionUsageError, match="was not executed"):
        decorated()
    assert orders() == []
    try:
        with pytest.raises(TransactionUsageError, match="executed by hand inside the block"):
            behind()
    finally:
        execute("DROP TABLE IF EXISTS made")
    assert (orders(), [key for key, decision in decisions().items() if decision == "C"]) == ([], [])


def test_a_temporary_table_does_not_end_the_block() -> None:
    with transaction.atomic(using=ALIAS):
        execute("CREATE TEMPORARY TABLE scratch (a int)")
        execute("DROP TEMPORARY TABLE scratch")
        place("kept")
    assert (orders(), decisions()) == (["kept"], {"kept": "C"})


def _deadlock(pool: ThreadPoolExecutor) -> None:
    """Make the open transaction of this thread the victim of a deadlock about shop_effect 1 and 2."""
    first, locked = threading.Event(), threading.Event()

    def other() -> None:
        with closing(open_connection(ALIAS)) as connection, connection.cursor() as cursor:
            cursor.execute("BEGIN")
            # The server ends the transaction that has changed fewer rows.
            cursor.execute("UPDATE shop_effect SET number = CONCAT('z', number) WHERE number NOT IN ('1', '2')")
            cursor.execute("UPDATE shop_effect SET number = 'x' WHERE number = '2'")
            locked.set()
            first.wait(20)
            cursor.execute("UPDATE shop_effect SET number = 'y' WHERE number = '1'")
            cursor.execute("ROLLBACK")

    done = pool.submit(other)
    assert locked.wait(20)
    execute("UPDATE shop_effect SET number = 'a' WHERE number = '1'")
    first.set()
    try:
        execute("UPDATE shop_effect SET number = 'b' WHERE number = '2'")
    finally:
        done.result(20)


def test_after_a_deadlock_that_was_caught_nothing_is_published() -> None:
    """The server has rolled the transaction back, and the next statement begins another one."""

    @transaction.atomic(using=ALIAS)
    def caught(pool: ThreadPoolExecutor) -> None:
        Order.objects.using(ALIAS).create(number="lost")
        with pytest.raises(OperationalError, match="Deadlock"):
            _deadlock(pool)
        place("behind")

    execute("CREATE INDEX by_number ON shop_effect (number)")
    try:
        Effect.objects.using(ALIAS).bulk_create(Effect(number=str(one)) for one in range(1, 100))
        with ThreadPoolExecutor(1) as pool, pytest.raises(TransactionUsageError, match="after a deadlock"):
            caught(pool)
    finally:
        execute("DROP INDEX by_number ON shop_effect")
    assert (orders(), decisions()) == ([], {})


def test_a_lock_timeout_in_a_publish_call_is_named() -> None:
    with closing(open_connection(ALIAS)) as other, other.cursor() as cursor:
        cursor.execute("LOCK TABLES outbox_ledger WRITE")
        execute("SET SESSION lock_wait_timeout = 1")
        with pytest.raises(SendFailed, match="held a lock for too long"), transaction.atomic(using=ALIAS):
            place("late")
    connections[ALIAS].close()
    assert orders() == []


def test_a_killed_server_loses_no_committed_transaction(mariadb_server: PrivateMariaDB) -> None:

    @transaction.atomic(using=ALIAS)
    def interrupted() -> None:
        place("open")
        mariadb_server.kill()
        mariadb_server.start()
        Order.objects.using(ALIAS).count()

    with end_messages_lost():
        with transaction.atomic(using=ALIAS):
            place("paid")
        with pytest.raises(OperationalError):
            interrupted()
    run_check_back()
    assert (decisions(), orders()) == ({"paid": "C", "open": "R"}, ["paid"])


# -- inbox and texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "decided"),
    [("producer.after_half", "R"), ("producer.after_local_commit", "C"), ("producer.before_end", "C")],
)
def test_check_back_decides_for_a_killed_producer(step: str, decided: str) -> None:
    """SIGKILL with the half message stored: before COMMIT, and between COMMIT and the end message."""
    # The child opens connections of its own.
    reset_broker()
    connections.close_all()

    def work() -> None:
        with transaction.atomic(using=ALIAS):
            place("paid")
        flush(within_seconds=5)

    assert killed(work, f"{step}=kill")

    def is_decided() -> bool:
        # Until MariaDB has noticed the end of the connection, the transaction counts as running.
        run_check_back()
        return decisions() == {"paid": decided}

    eventually(is_decided, within_seconds=30, what=lambda: str(decisions()))
    assert orders() == (["paid"] if decided == "C" else [])


def test_every_text_of_our_tables_is_compared_exactly() -> None:
    found = execute(
        "SELECT table_name, column_name, collation_name FROM information_schema.columns WHERE table_schema = DATABASE()"
        " AND table_name LIKE 'outbox!_%%' ESCAPE '!'"
        " AND collation_name <> 'utf8mb4_nopad_bin'"
    )
    assert found == []


def test_a_message_of_a_handler_that_does_not_answer_waits_and_is_no_attempt() -> None:
    @subscriber("orders", group="effects", using=ALIAS)
    def effect(given: Delivery) -> None:
        Effect.objects.using(ALIAS).create(number=given.key)

    once = uuid7()
    with closing(open_connection(ALIAS)) as frozen, frozen.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(
            "INSERT INTO outbox_inbox (consumer_group, generation, message_id) VALUES ('effects', 1, %s)", [once]
        )
        assert isinstance(deliver("one", "effects", once), HandlerNotStarted)
        cursor.execute("ROLLBACK")
    assert deliver("one", "effects", once) is Disposition.HANDLED
    assert deliver("one", "effects", once) is Disposition.SKIPPED


def test_old_rows_of_the_inbox_are_pruned() -> None:
    InboxEntry.objects.using(ALIAS).create(group="effects", generation=1, message_id=uuid7())
    age = datetime.now(UTC) - InboxEntry.objects.using(ALIAS).get().handled_at
    assert abs(age) < timedelta(minutes=5)
    InboxEntry.objects.using(ALIAS).update(handled_at=datetime.now(UTC) - timedelta(days=20))
    assert prune_inboxes(older_than=datetime.now(UTC) - timedelta(days=14)).inbox == 1
    assert not InboxEntry.objects.using(ALIAS).exists()


# -- checks --------------------------------------------------------------------------------------------


def found() -> list[tuple[str, str]]:
    return [(str(one.id), one.msg) for one in run_checks(databases=[ALIAS]) if str(one.id) in _IDS]


_IDS = ("outbox.E039", "outbox.W040", "outbox.W022")


def test_a_server_that_fits_is_not_named() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("statement", "check_id", "text"),
    [
        ("SET time_zone = '+02:00'", "outbox.E039", "not UTC"),
        ("SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED", "outbox.E039", "uncommitted rows"),
        ("SET idle_transaction_timeout = 0", "outbox.W040", "idle transactions"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(statement: str, check_id: str, text: str) -> None:
    execute(statement)
    [(name, said)] = found()
    connections[ALIAS].close()
    assert name == check_id and text in said


def test_a_table_without_transactions_is_named() -> None:
    execute("ALTER TABLE outbox_unique ENGINE = Aria")
    try:
        [(name, said)] = found()
    finally:
        execute("ALTER TABLE outbox_unique ENGINE = InnoDB")
    assert name == "outbox.E039" and "outbox_unique" in said
