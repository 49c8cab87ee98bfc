"""publish(…, Unique(…)): one message per topic and key in that time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.core.checks import run_checks
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox import SendReceipt, hooks
from outbox.contrib.django import (
    message,
    publish,
    publish_many,
    publish_messages,
    recall,
    run_check_back,
    run_prune,
    transactional_message,
)
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.models import LedgerEntry
from outbox.contrib.unique import Unique, keys
from outbox.contrib.unique.models import UniqueKey
from outbox.contrib.unique.option import MAX_WITHIN
from outbox.errors import (
    ConfigurationError,
    InvalidMessage,
    SendFailed,
    TransactionUsageError,
    UsageError,
)
from tests.django.shop.models import Order
from tests.django.state import decisions, execute, renamed, rolled_back, stored
from tests.django.threads import Other
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log")

HOUR = timedelta(hours=1)


def once(key: str = "invoice:7", *, name: str = "", topic: str = "orders", **options: Any) -> SendReceipt:
    """Publish a message with a unique key; `name` is the message's own key, by which the tests find the message."""
    return publish(topic, {}, Unique(key, within=HOUR), key=name or key, **options)


def names() -> list[str]:
    """The keys of the committed messages, in log order."""
    return [item.key for item in stored() if item.decision == "C"]


def holders(alias: str = "default") -> dict[str, UUID]:
    """Every key -> the message that holds it."""
    return dict(UniqueKey.objects.using(alias).values_list("unique_key", "message_id"))


def end_windows(alias: str = "default") -> None:
    """Let the time of all keys be over."""
    past = "'2020-01-01 00:00:00.000'"
    execute(f"UPDATE outbox_unique SET until = {past}", alias=alias)


def pruned(**options: Any) -> int:
    return run_prune(**options).of_parts["outbox_unique"]


# -- what a duplicate is ----------------------------------------------------------------------------


def test_a_second_message_with_the_key_is_a_duplicate_of_the_first(path: str) -> None:
    with transaction.atomic():
        first = once(name="first")
    with transaction.atomic():
        Order.objects.create(number="beside the duplicate")
        second = once(name="second")
    assert first.duplicate_of is None
    assert second.duplicate_of == first.message_id
    assert second.message_id != first.message_id
    assert second.position is None
    assert [item.key for item in stored()] == ["first"]
    assert LedgerEntry.objects.count() == (path == "two_phase")
    assert Order.objects.filter(number="beside the duplicate").exists()
    assert holders() == {"invoice:7": first.message_id}
    with transaction.atomic():
        assert once(topic="payments").duplicate_of is None, "a topic has keys of its own"
    with transaction.atomic(using="other"):
        assert once(using="other").duplicate_of is None, "and so has a database"


def test_a_rollback_and_a_savepoint_free_the_key(path: str) -> None:
    with rolled_back():
        once(name="rolled back")
    with transaction.atomic():
        with rolled_back():
            once(name="to a savepoint")
        assert once(name="kept").duplicate_of is None
    run_check_back()
    assert names() == ["kept"]


# -- the time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["default", "lite"])
def test_its_time_is_measured_by_the_database_and_then_the_row_is_replaced_in_place(alias: str) -> None:
    with transaction.atomic(using=alias):
        once(using=alias)
    now, until, hour = {
        "postgresql": ("clock_timestamp()", "until", "interval '1 hour'"),
        "sqlite": ("julianday('now')", "julianday(until)", "1.0 / 24"),
        "mysql": ("UTC_TIMESTAMP(6)", "until", "INTERVAL 1 HOUR"),
    }[connections[alias].vendor]
    assert [
        bool(value)
        for value in execute(f"SELECT {until} > {now}, {until} <= {now} + {hour} FROM outbox_unique", alias=alias)[0]
    ] == [True, True]
    end_windows(alias)
    with transaction.atomic(using=alias):
        second = once(using=alias)
        assert second.duplicate_of is None
        assert once(using=alias).duplicate_of == second.message_id
    assert holders(alias) == {"invoice:7": second.message_id}


def test_the_first_message_chooses_the_time() -> None:
    with transaction.atomic():
        publish("orders", {}, Unique("a", within=timedelta(microseconds=1)))
        assert publish("orders", {}, Unique("a", within=3600)).duplicate_of is None
        assert publish("orders", {}, Unique("a", within=timedelta(microseconds=1))).duplicate_of is not None


def test_a_recalled_message_keeps_its_key() -> None:
    with transaction.atomic():
        first = once(topic="reminders", delay=timedelta(days=2))
    assert names() == ["invoice:7"]
    recall(first.message_id)
    with transaction.atomic():
        assert once(topic="reminders").duplicate_of == first.message_id


@pytest.mark.parametrize("alias", ["default", "lite"])
def test_pruning_removes_keys_whose_time_is_over(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.contrib.django.ledger.pruning._BATCH", 2)
    with transaction.atomic(using=alias):
        for number in range(5):
            once(f"over:{number}", using=alias)
    end_windows(alias)
    with transaction.atomic(using=alias):
        once("held", using=alias)
    assert pruned() == 5
    assert set(holders(alias)) == {"held"}
    assert pruned() == 0


# -- several messages -------------------------------------------------------------------------------


def test_publish_many_leaves_duplicates_out(path: str) -> None:
    with transaction.atomic():
        held = once("2")
    with transaction.atomic():
        bodies = [{"n": n} for n in ("1", "2", "3", "1")]
        receipts = publish_many(
            "orders", bodies, lambda body: Unique(body["n"], within=HOUR), key=lambda body: f"many {body['n']}"
        )
    assert [item.duplicate_of for item in receipts] == [None, held.message_id, None, receipts[0].message_id]
    assert {item.transaction_id for item in receipts} == {receipts[0].message_id}
    assert names() == ["2", "many 1", "many 3"]


def test_the_transaction_id_is_the_id_of_the_first_message_that_is_stored(path: str) -> None:
    with transaction.atomic():
        once("1")
    with transaction.atomic():
        built = [message("orders", {}, Unique("1", within=HOUR)), message("payments", {}, key="plain")]
        receipts = publish_messages(built)
    assert [item.duplicate_of is None for item in receipts] == [False, True]
    assert {item.transaction_id for item in receipts} == {built[1].message_id}
    assert names() == ["1", "plain"]


def test_all_keys_of_a_call_are_taken_by_one_statement() -> None:
    with CaptureQueriesContext(connections["default"]) as queries, transaction.atomic():
        publish_many("orders", [{"n": n} for n in range(50)], lambda body: Unique(body["n"], within=HOUR))
    assert sum("outbox_unique" in query["sql"] for query in queries) == 1
    assert len(names()) == 50


# -- decorators and handlers ------------------------------------------------------------------------


@transactional_message(
    "orders", lambda number: Unique(number.partition(" ")[0], within=HOUR), body={}, key=lambda number: number
)
def early(number: str) -> None:
    Order.objects.create(number=number)


@transactional_message(
    "orders", lambda result: Unique(result, within=HOUR), body=lambda result: {}, key=lambda number: number
)
def late(number: str) -> str:
    Order.objects.create(number=number)
    return number.partition(" ")[0]


@pytest.mark.parametrize("place", [early, late])
def test_a_decorated_function_runs_and_publishes_no_duplicate(place: Callable[[str], object]) -> None:
    place("7 first")
    place("7 second")
    place("8 third")
    assert Order.objects.count() == 3
    assert names() == ["7 first", "8 third"]


# -- two connections --------------------------------------------------------------------------------


@pytest.fixture
def pool(django_db_blocker: Any) -> Iterator[ThreadPoolExecutor]:
    """Threads with connections of their own."""
    with ThreadPoolExecutor(4) as made:
        yield made


def waiting(count: int) -> None:
    """Wait until this number of sessions of the application's database waits for a lock."""
    with psycopg.connect(alias_conninfo("default"), autocommit=True) as connection:

        def count_of() -> bool:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).fetchone()
            return row == (count,)

        eventually(count_of, within_seconds=20, what=f"{count} sessions wait for a lock")


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("commits", [True, False])
def test_a_second_publisher_waits_for_the_first(pool: ThreadPoolExecutor, commits: bool, expired: bool) -> None:
    if expired:
        with transaction.atomic():
            once(name="expired")
        end_windows()
    first = Other(pool, lambda: once(name="first"), commits=commits)
    assert first.done.wait(20)
    second = Other(pool, lambda: once(name="second"))
    waiting(1)
    held = first.end()
    found = second.end()
    assert (held.duplicate_of, found.duplicate_of) == (None, held.message_id if commits else None)
    run_check_back()
    assert names()[expired:] == (["first"] if commits else ["second"])


def test_duplicates_do_not_wait_for_each_other(pool: ThreadPoolExecutor) -> None:
    with transaction.atomic():
        once()
    several = [Other(pool, once) for _ in range(3)]
    for one in several:
        assert one.done.wait(20)
    assert all(one.end().duplicate_of is not None for one in several)


def test_waiting_ends_with_lock_timeout(pool: ThreadPoolExecutor) -> None:
    first = Other(pool, once)
    assert first.done.wait(20)

    def once_with_a_timeout() -> None:
        with transaction.atomic():
            execute("SET LOCAL lock_timeout = '50ms'")
            once()

    with pytest.raises(SendFailed, match="held a lock for too long"):
        once_with_a_timeout()
    assert first.end().duplicate_of is None


def test_a_key_that_is_pruned_meanwhile_is_taken(pool: ThreadPoolExecutor) -> None:
    with transaction.atomic():
        once()
    end_windows()
    prune = Other(pool, lambda: keys.delete_expired(connections["default"], limit=10))
    assert prune.done.wait(20)
    publisher = Other(pool, once)
    waiting(1)
    assert prune.end() == 1
    assert publisher.end().duplicate_of is None


def test_pruning_leaves_out_a_key_that_is_being_replaced(pool: ThreadPoolExecutor) -> None:
    with transaction.atomic():
        once()
    end_windows()
    publisher = Other(pool, once)
    assert publisher.done.wait(20)
    assert pruned() == 0
    assert publisher.end().duplicate_of is None
    assert len(holders()) == 1


def batch(*wanted: str) -> Callable[[], list[UUID | None]]:
    def publish_batch() -> list[UUID | None]:
        receipts = publish_many("orders", list(wanted), lambda body: Unique(body, within=HOUR))
        return [receipt.duplicate_of for receipt in receipts]

    return publish_batch


@pytest.mark.parametrize("expired", [False, True])
def test_two_batches_with_the_same_keys_do_not_deadlock(pool: ThreadPoolExecutor, expired: bool) -> None:
    if expired:
        with transaction.atomic():
            batch("a", "m", "z")()
        end_windows()
    middle = Other(pool, batch("m"), commits=False)
    assert middle.done.wait(20)
    one = Other(pool, batch("a", "m", "z"))
    waiting(1)
    two = Other(pool, batch("z", "m", "a"))
    waiting(2)
    middle.end()
    for batch_of_one in (one, two):
        batch_of_one.let_end()
    found = [one.end(), two.end()]
    # With expired keys, either batch may come first.
    assert sorted(found, key=lambda duplicates: None in duplicates)[1] == [None, None, None]
    assert None not in sorted(found, key=lambda duplicates: None in duplicates)[0]


def test_batches_in_the_order_of_the_call_would_deadlock(pool: ThreadPoolExecutor) -> None:
    """The control of the test above."""

    def insert(*wanted: str) -> Callable[[], None]:
        def insert_keys() -> None:
            with connections["default"].cursor() as cursor:
                values: list[Any] = [
                    ["orders"] * len(wanted),
                    list(wanted),
                    [uuid4() for _ in wanted],
                    [60.0] * len(wanted),
                ]
                cursor.execute(keys._INSERT_POSTGRESQL, values)

        return insert_keys

    middle = Other(pool, insert("m"), commits=False)
    assert middle.done.wait(20)
    both = [Other(pool, insert("a", "m", "z")), Other(pool, insert("z", "m", "a"))]
    waiting(2)
    middle.end()
    errors = []
    for one in both:
        one.let_end()
    for one in both:
        try:
            one.end()
        except OperationalError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "deadlock detected" in errors[0]


def test_a_fifo_key_is_locked_before_the_unique_key(path: str, pool: ThreadPoolExecutor) -> None:
    """The transaction that waits for the FIFO key holds no unique key, so the other one can take it."""
    is_published, fifo_go = threading.Event(), threading.Event()

    def first() -> SendReceipt:
        publish("steps", {}, key="k")
        is_published.set()
        assert fifo_go.wait(20)
        return once(topic="steps", name="k")

    fifo = Other(pool, first)
    # A look for any advisory lock would also see the one by which a process proves its path.
    assert is_published.wait(20)
    second = Other(pool, lambda: once(topic="steps", name="k"))
    waiting(1)
    fifo_go.set()
    assert fifo.done.wait(20)
    held = fifo.end()
    assert held.duplicate_of is None
    assert second.end().duplicate_of == held.message_id


# -- isolation levels -------------------------------------------------------------------------------


@contextlib.contextmanager
def isolated(level: str) -> Iterator[None]:
    """A transaction of this isolation level with a snapshot."""
    with transaction.atomic():
        with connections["default"].cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            cursor.execute("SELECT 1 FROM shop_order")
        yield


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_key_held_before_the_snapshot_makes_a_duplicate(level: str) -> None:
    with transaction.atomic():
        first = once()
    with isolated(level):
        assert once().duplicate_of == first.message_id
    end_windows()
    with isolated(level):
        second = once()
        assert second.duplicate_of is None
        assert once().duplicate_of == second.message_id


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("expired", [False, True])
def test_a_key_taken_after_the_snapshot_is_a_serialization_failure(
    level: str, expired: bool, pool: ThreadPoolExecutor
) -> None:
    if expired:
        with transaction.atomic():
            once()
        end_windows()
    taken: list[SendReceipt] = []

    def once_after_another() -> None:
        with isolated(level):
            taken.append(Other(pool, once).end())
            once()

    with pytest.raises(SendFailed, match="another transaction conflicted with this transaction"):
        once_after_another()
    assert taken[0].duplicate_of is None
    with isolated(level):
        assert once().duplicate_of == taken[0].message_id


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_key_pruned_after_the_snapshot_is_taken_once(level: str, pool: ThreadPoolExecutor) -> None:
    with transaction.atomic():
        once()
    end_windows()
    with isolated(level):
        assert Other(pool, lambda: keys.delete_expired(connections["default"], limit=10)).end() == 1
        taken = once()
        assert taken.duplicate_of is None
        # The snapshot has two rows of the key now: the pruned one, and the one of this transaction.
        assert UniqueKey.objects.count() == 2
        assert once().duplicate_of == taken.message_id
    assert holders() == {"invoice:7": taken.message_id}


# -- SQLite -----------------------------------------------------------------------------------------


def test_on_sqlite() -> None:
    with transaction.atomic(using="lite"):
        first = once(using="lite", name="first")
    with rolled_back("lite"):
        once("free", using="lite")
    with transaction.atomic(using="lite"):
        built = [message("orders", {}, Unique(key[0], within=HOUR), key=key) for key in ("i", "free", "f2")]
        receipts = publish_messages([*built, message("orders", {}, Unique("invoice:7", within=HOUR))], using="lite")
    assert [item.duplicate_of for item in receipts] == [None, None, receipts[1].message_id, first.message_id]


# -- erasures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["default", "lite"])
def test_an_erasure_deletes_the_key(alias: str) -> None:
    erasing = pytest.importorskip("outbox.contrib.erasure.erasing")
    with transaction.atomic(using=alias):
        publish("orders", {}, Unique("person-7", within=60), key="person", using=alias)
    run_check_back()
    erased = erasing.erase(erasing.ErasureRequest(topic="orders", key="person"), reason="asked", dry_run=False)
    assert (len(erased.message_ids), erased.rows[f"{alias}.outbox_unique"]) == (1, 1)
    assert holders(alias) == {}
    assert erasing.ErasureEntry.objects.using(alias).count() == 1


# -- refusals ---------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    """More of them are in test_refused_values.py."""
    number = uuid4()
    with transaction.atomic():
        publish("orders", {}, Unique(7, within=1.5))
        publish("orders", {}, Unique(number, within=MAX_WITHIN))
    assert set(holders()) == {"7", str(number)}
    cases: list[tuple[Any, Any, str]] = [
        ("x" * 256, 60, "must be a text of 1 to 255 characters"),
        (lambda body: "a", 60, "must be a text of 1 to 255 characters"),
        ("a", 0, "more than 0 and at most 366 days"),
        ("a", MAX_WITHIN + timedelta(microseconds=1), "at most 366 days"),
    ]
    for key, within, text in cases:
        with pytest.raises(InvalidMessage, match=text) as raised, transaction.atomic():
            publish("orders", {}, Unique(key, within=within))
        assert "'orders'" in str(raised.value) and "Nothing was published" in str(raised.value)
    assert len(stored()) == 2


def test_outside_of_a_transaction_it_is_refused(path: str) -> None:
    with pytest.raises(TransactionUsageError, match="needs a transaction"):
        once()
    with pytest.raises(TransactionUsageError, match="needs a transaction"):
        publish_messages([message("orders", {}, Unique("a", within=60))], at_once=True)
    assert stored() == []
    assert holders() == {}


def test_one_key_for_several_messages_and_two_keys_for_one_are_refused() -> None:
    same = Unique("a", within=60)
    with pytest.raises(UsageError, match="only the first of them would be published"), transaction.atomic():
        publish_many("orders", [{}, {}], same)
    with pytest.raises(UsageError, match="not the only unique key of a message"), transaction.atomic():
        publish("orders", {}, same, Unique("b", within=60))
    with pytest.raises(ConfigurationError, match="cannot be used together with"):
        transactional_message("orders", same, messages=list)  # type: ignore[call-overload]
    assert (stored(), holders()) == ([], {})


def test_without_the_app_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would remove the key."""
    monkeypatch.delitem(hooks.prunings, "outbox_unique")
    with pytest.raises(ConfigurationError, match="Add the app to INSTALLED_APPS"), transaction.atomic():
        once()


def test_a_missing_table_is_named() -> None:
    def once_without_the_table() -> None:
        with transaction.atomic():
            execute("ALTER TABLE outbox_unique RENAME TO outbox_elsewhere")
            once()

    with pytest.raises(ConfigurationError, match="migrate --database=default"):
        once_without_the_table()
    assert holders() == {}
    with renamed("outbox_unique", alias="other"):
        [said] = [one.msg for one in run_checks(databases=["other"]) if one.id == "outbox.W021"]
    assert said.startswith("outbox_unique are missing in 'other'")


# -- the cost of messages without a key -------------------------------------------------------------


def test_a_message_without_a_key_does_not_touch_the_table(path: str) -> None:
    with CaptureQueriesContext(connections["default"]) as queries, transaction.atomic():
        publish("orders", {}, key="plain")
    assert not any("outbox_unique" in query["sql"] for query in queries)
    assert decisions() == {"plain": "C"}
