"""Handlers that share a transaction: each effect happens once, and only the guilty message is charged.

tests/mistakes runs random handlers in the same way (the side "sharing").
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction

from outbox import Delivery, Message, OnError, RetryPolicy
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.broker.process import run_broker
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.errors import PermanentError, RetryLater
from outbox.hooks import Option
from outbox.ports import Disposition, RunAlone
from outbox.topic import Topic
from outbox.utils import fence
from tests.django.effects.own_transaction import transaction_id
from tests.django.entry_points import say
from tests.django.processes import child, process
from tests.django.sharing import Waiting
from tests.django.shop.models import Effect, Order, Payment
from tests.django.state import effects, execute, postgres_broker, stored
from tests.django.test_inbox import delivery
from tests.django.test_poolers import OLD, behind
from tests.django.threads import Other
from tests.django.urls import Refused
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

HANDLED, SKIPPED, ALONE = Disposition.HANDLED, Disposition.SKIPPED, RunAlone.RUN_ALONE


def deliveries(*keys: str) -> list[Delivery]:
    return [delivery(key) for key in keys]


def share(*given: Delivery) -> tuple[list[Any], Waiting]:
    """Hand deliveries to the subscriber of group `effects`, all but the first as waiting calls."""
    registered = next(item for item in registry.subscribers() if item.subscription.group == "effects")
    more = Waiting(given[1:])
    results = InboxInvoker(has_generations=True).share(
        registered.subscription, registered.handler, given[0], more, generation=1
    )
    return list(results), more


def alone(given: Delivery, *, generation: int = 1) -> Any:
    registered = next(item for item in registry.subscribers() if item.subscription.group == "effects")
    invoker = InboxInvoker(has_generations=generation > 1)
    [result] = invoker(registered.subscription, registered.handler, [given], generation=generation)
    return result


def handle_with(function: Callable[[Delivery], Any]) -> None:
    """Register a handler that writes an effect and then calls the function."""

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        function(given)


def test_messages_share_one_transaction() -> None:
    seen: list[int] = []
    handle_with(lambda given: seen.append(transaction_id()))
    given = deliveries("a", "b", "c")
    assert share(*given)[0] == [HANDLED] * 3
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert effects() == ["a", "b", "c"]
    # The inbox has a row of each.
    assert [alone(one) for one in given] == [SKIPPED] * 3


def test_a_message_that_was_handled_before_is_skipped_in_between() -> None:
    handle_with(lambda given: None)
    for generation in (1, 2):
        given = deliveries("a", "b", "c")
        assert alone(given[1], generation=generation) is HANDLED
        assert share(*given)[0] == [HANDLED, SKIPPED, HANDLED]
    assert share(*given)[0] == [SKIPPED] * 3
    assert effects() == [*"aabbcc"]


@pytest.mark.parametrize("error", [Refused(), RetryLater("later", level=2)])
def test_a_failing_handler_takes_nothing_from_the_messages_before_it(error: Exception) -> None:
    def fail(given: Delivery) -> None:
        if given.key == "poison":
            raise error

    handle_with(fail)
    results, more = share(*deliveries("a", "b", "poison", "later"))
    assert results == [HANDLED, HANDLED, error]
    # Nothing joins after a failure: the message waits for the next transaction.
    assert [one.key for one in more.waiting] == ["later"]
    assert effects() == ["a", "b"]


def test_a_failing_first_message_fails_as_it_does_alone() -> None:
    def fail(given: Delivery) -> None:
        raise Refused

    handle_with(fail)
    results, more = share(*deliveries("poison", "later"))
    assert [type(result) for result in results] == [Refused]
    assert len(more.waiting) == 1
    assert effects() == []


def test_after_a_failed_commit_each_message_runs_alone_and_one_is_guilty() -> None:
    """The constraint is deferred: COMMIT itself finds the violation."""
    handle_with(lambda given: Payment.objects.create(reference="same" if given.key in "bd" else given.key))
    given = deliveries("a", "b", "c", "d")
    assert share(*given)[0] == [ALONE] * 4
    assert effects() == []
    results = [alone(one) for one in given]
    assert results[:3] == [HANDLED] * 3
    assert isinstance(results[3], IntegrityError)
    assert effects() == ["a", "b", "c"]


def test_a_skipped_message_is_not_given_up_when_the_transaction_fails() -> None:
    handle_with(lambda given: Payment.objects.create(reference="same") if given.key in "cd" else None)
    given = deliveries("a", "b", "c", "d")
    assert alone(given[1]) is HANDLED
    assert share(*given)[0] == [ALONE, SKIPPED, ALONE, ALONE]


def test_a_lock_that_another_transaction_holds_delays_the_earlier_messages_a_moment_only() -> None:
    Order.objects.create(number="busy")
    waited: list[str] = []

    def update(given: Delivery) -> None:
        if given.key == "busy":
            waited.append(setting("lock_timeout"))
            Order.objects.filter(number="busy").update(status="seen")

    handle_with(update)
    given = deliveries("a", "busy", "later")
    with holding("busy"):
        results, _ = share(*given)
    assert results == [HANDLED, ALONE]
    assert waited == ["20ms"]
    assert effects() == ["a"]
    # Alone it waits as long as it may.
    assert alone(given[1]) is HANDLED
    assert waited == ["20ms", "5s"]


@pytest.mark.parametrize(
    "statement",
    [
        "SET LOCAL statement_timeout = '7s'",
        "/* a comment */ SET LOCAL statement_timeout = '7s'",
        "SELECT set_config('statement_timeout', '7s', true)",
        "CREATE TEMPORARY TABLE own (n integer) ON COMMIT DROP",
        "SELECT 1 AS n INTO TEMP own; DROP TABLE own",
        "LOCK TABLE shop_payment",
        "SELECT 1; SET LOCAL statement_timeout = '7s'",
        "UPDATE shop_order SET status = 'x'; LOCK TABLE shop_payment",
        "SELECT 'a;b'; SET LOCAL statement_timeout = '7s'",
    ],
)
def test_what_lasts_until_commit_never_reaches_the_next_handler(statement: str) -> None:
    def execute(given: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    handle_with(execute)
    results, more = share(*deliveries("a", "b"))
    assert results == [HANDLED]
    assert len(more.waiting) == 1
    assert more.ended == []


def test_statements_on_rows_let_the_next_message_join() -> None:
    def execute(given: Delivery) -> None:
        Effect.objects.using("other").count()
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("WITH found AS (SELECT 1) SELECT * FROM found")
            cursor.execute("(SELECT 1) UNION (SELECT 2)")
            cursor.execute("-- note\n/* set */ UPDATE shop_order SET status = 'set'")

    handle_with(execute)
    assert share(*deliveries("a", "b", "c"))[0] == [HANDLED] * 3


def test_on_commit_callbacks_run_after_commit_and_apart(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[tuple[str, bool]] = []

    def later(given: Delivery) -> None:
        def callback(name: str) -> None:
            ran.append((name, connection.in_atomic_block))
            if name == "b1":
                raise Refused

        for number in (1, 2):
            transaction.on_commit(lambda name=f"{given.key}{number}": callback(name))  # type: ignore[misc]
        if given.key == "d":
            raise Refused

    handle_with(later)
    results, _ = share(*deliveries("a", "b", "c", "d"))
    assert results[:3] == [HANDLED] * 3
    # An error ends the callbacks of its own message, as alone. Those of a message that failed do not run.
    assert ran == [("a1", False), ("a2", False), ("b1", False), ("c1", False), ("c2", False)]
    assert "has committed, so the handler is not called again" in caplog.text
    assert effects() == ["a", "b", "c"]


class Locking(Option):
    """An option of a part, which acts in the transaction of the publisher."""

    is_kept = True


def send_elsewhere(given: Delivery) -> None:
    with transaction.atomic(using="broker"):
        publish("orders", {}, key="sent", using="broker")


def test_what_other_messages_must_not_wait_for_ends_the_sharing() -> None:
    """A key, or what an option locks, stays locked until COMMIT. What belongs to another database is visible at once;
    if the common transaction failed, the handler would do it again."""
    ends: list[tuple[Callable[[Delivery], Any], str]] = [
        (lambda given: publish("steps", {}, key="k"), "FIFO topic"),
        (lambda given: publish("orders", {}, Locking()), "with an option that locks"),
        (lambda given: Effect.objects.using("other").create(number=given.key), "another database"),
        (send_elsewhere, "another database"),
    ]
    for function, reason in ends:
        handle_with(function)
        results, more = share(*deliveries("a", "b"))
        assert results == [HANDLED]
        assert reason in more.ended[0]
        registry.unregister_all()


def test_a_handler_without_inbox_does_not_share() -> None:
    @subscriber("orders", group="effects", idempotent=False)
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)

    results, more = share(*deliveries("a", "b"))
    assert results == [HANDLED]
    assert "no inbox" in more.ended[0]


def test_what_handlers_publish_goes_with_their_messages() -> None:
    def forward(given: Delivery) -> None:
        publish("payments", {}, key=given.key)
        if given.key == "poison":
            raise Refused

    handle_with(forward)
    assert share(*deliveries("a", "b", "poison"))[0][:2] == [HANDLED] * 2
    committed = {one.key for one in stored() if not one.half or one.decision == "C"}
    assert committed == {"a", "b"}


def test_a_lost_lease_stores_nothing_of_any_message() -> None:
    lost = threading.Event()

    def lose(given: Delivery) -> None:
        if given.key == "b":
            lost.set()

    handle_with(lose)
    with fence.attempt(lambda: "the lease is over" if lost.is_set() else ""):
        assert share(*deliveries("a", "b", "c"))[0] == [ALONE] * 3
    assert effects() == []


@pytest.mark.parametrize("error", [Refused(), SystemExit("x"), asyncio.CancelledError()])
def test_a_commit_by_hand_keeps_what_it_has_committed(error: BaseException) -> None:
    """The inbox row of a message is written only when its turn comes, so nothing unhandled counts as handled.

    Alone, too: the next attempt would find the inbox row, and skip the message without a word.
    """
    ran: list[str] = []

    def commit(given: Delivery) -> None:
        transaction.on_commit(lambda: ran.append(given.key))
        if given.key == "b":
            connection.connection.execute("COMMIT")
            raise error

    handle_with(commit)
    given = deliveries("a", "b", "c")
    results, more = share(*given)
    assert results[0] is HANDLED
    assert isinstance(results[1], PermanentError) and "ended its transaction by hand" in str(results[1])
    assert [one.key for one in more.waiting] == ["c"]
    assert (effects(), ran) == (["a", "b"], ["a"])
    assert alone(given[2]) is HANDLED
    assert isinstance(alone(delivery("b")), PermanentError)


@pytest.mark.parametrize("error", [SystemExit("x"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_callback_that_ends_the_thread_harms_its_own_message_only(error: BaseException) -> None:
    ran: list[str] = []

    def callback(key: str) -> None:
        ran.append(key)
        if key == "a":
            raise error

    handle_with(lambda given: transaction.on_commit(lambda: callback(given.key)))
    # An error that escapes would be charged to the last message.
    assert share(*deliveries("a", "b", "c"))[0] == [HANDLED] * 3
    assert ran == ["a", "b", "c"]
    assert alone(delivery("a")) is HANDLED


@pytest.mark.parametrize("error", [SystemExit("x"), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_after_an_error_that_ends_the_thread_the_next_message_is_fine(error: BaseException) -> None:
    def fail(given: Delivery) -> None:
        transaction.on_commit(lambda: None)
        if given.key == "b":
            raise error

    handle_with(fail)
    given = deliveries("a", "b", "c")
    assert share(*given)[0] == [ALONE] * 2
    with pytest.raises(type(error)):
        alone(given[1])
    assert effects() == []
    assert connection.savepoint_ids == []
    assert share(*deliveries("x", "y"))[0] == [HANDLED] * 2


@pytest.mark.parametrize("how", ["iterator", "callproc"])
def test_a_lock_timeout_outside_of_execute_is_seen_although_the_handler_swallows_it(how: str) -> None:
    Order.objects.create(number="busy")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE OR REPLACE FUNCTION hostile_lock() RETURNS integer LANGUAGE sql VOLATILE AS "
            "'UPDATE shop_order SET status = status RETURNING 1'"
        )
    branches: list[str] = []

    def update(given: Delivery) -> None:
        if given.key != "busy":
            return
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                if how == "iterator":
                    list(Order.objects.filter(number="busy").select_for_update().iterator(chunk_size=1))
                else:
                    cursor.callproc("hostile_lock", [])
            branches.append("locked")
        except OperationalError:
            branches.append("gave up")

    handle_with(update)
    given = deliveries("a", "busy")
    with holding("busy"):
        assert share(*given)[0] == [HANDLED, ALONE]
    assert alone(given[1]) is HANDLED
    assert branches == ["gave up", "locked"]


def leave_a_pipeline_open() -> None:
    connection.connection.pipeline().__enter__()
    connection.connection.execute("SELECT 1")


# tests/mistakes also ends sessions and transactions by hand, with and without an error.
ABUSES: dict[str, Callable[[], object]] = {
    "close_all": connections.close_all,
    "close of the driver": lambda: connection.connection.close(),
    "pipeline": leave_a_pipeline_open,
}


@pytest.mark.parametrize("how", ABUSES)
@pytest.mark.parametrize("fails", [True, False])
def test_an_abused_connection_harms_no_other_message(how: str, fails: bool) -> None:
    def abuse(given: Delivery) -> None:
        if given.key == "b":
            ABUSES[how]()
            if fails:
                raise Refused

    handle_with(abuse)
    given = deliveries("a", "b", "c")
    results, more = share(*given)
    assert all(result in (HANDLED, ALONE) for result in results[:1]), results
    again = [alone(one) for one, result in zip(given, results, strict=False) if result is ALONE]
    assert not again or again[0] is HANDLED
    assert all(alone(one) is HANDLED for one in more.waiting)
    assert {"a", "c"} <= set(effects())


@pytest.mark.usefixtures("calls_share")
@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_inner_block_without_savepoint_swallowed(key: str) -> None:
    def fail(given: Delivery) -> None:
        if given.key == key:
            with contextlib.suppress(Refused), transaction.atomic(savepoint=False):
                raise Refused

    handle_with(fail)
    results, _ = share(*deliveries("a", "b", "c"))
    if key == "a":
        assert len(results) == 1 and isinstance(results[0], Exception)
    else:
        assert ALONE in results
        assert all(result in (HANDLED, ALONE) for result in results)


@pytest.mark.usefixtures("calls_share")
def test_nested_publish_that_fails_is_swallowed() -> None:
    def bad(given: Delivery) -> None:
        publish("payments", {}, key=given.key)
        if given.key == "b":
            with contextlib.suppress(Exception):
                publish("no such topic", {})

    handle_with(bad)
    given = deliveries("a", "b", "c")
    assert share(*given)[0] == [HANDLED, ALONE]
    assert isinstance(alone(given[1]), Exception)
    assert effects() == ["a"]


@pytest.mark.slow
def test_threads_that_need_the_same_rows_in_other_orders_finish() -> None:
    """Each message updates two of four rows. Nothing is lost or doubled, and no message fails."""
    for number in range(4):
        Order.objects.create(number=f"row{number}", status="0")
    turns = Counter[str]()

    def update(given: Delivery) -> None:
        first, second = given.key.split("-")
        turns[given.key] += 1
        for row in (first, second):
            with connection.cursor() as cursor:
                cursor.execute("UPDATE shop_order SET status = (status::integer + 1)::text WHERE number = %s", [row])

    handle_with(update)
    batches = [
        deliveries(*(f"row{(n + turn) % 4}-row{(n * 3 + turn + 1) % 4}" for n in range(12))) for turn in range(8)
    ]

    def work(batch: list[Delivery]) -> None:
        try:
            waiting = batch
            while waiting:
                results, more = share(*waiting)
                again = [one for one, result in zip(waiting, results, strict=False) if result is ALONE]
                assert all(result in (HANDLED, ALONE) for result in results), results
                assert all(alone(one) is HANDLED for one in again)
                waiting = more.waiting
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, batches))
    assert len(effects()) == 96
    total = sum(int(status) for status in Order.objects.values_list("status", flat=True))
    assert total == 2 * 96


def setting(name: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting(%s)", [name])
        return str(cursor.fetchone()[0])


@contextlib.contextmanager
def holding(number: str) -> Iterator[None]:
    """Another transaction has updated an order, and does not end while the block runs."""
    with ThreadPoolExecutor(1) as pool:
        other = Other(pool, lambda: Order.objects.filter(number=number).update(status="held"))
        assert other.done.wait(10)
        try:
            yield
        finally:
            other.end()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


# -- as in production: poolers, connection settings, stops and deaths -------------------------------


# -- a broker and consumers in this process --------------------------------------------------------


@contextlib.contextmanager
def running(*works: Callable[[threading.Event], Any]) -> Iterator[None]:
    """Run each work in a thread, until the block ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def leading() -> Callable[[threading.Event], Any]:
    database = broker_database(get_settings())
    return lambda stop: run_broker(database, stop)


def consuming(lease_seconds: float = 10.0, *, threads: int | None = None) -> Callable[[threading.Event], Any]:
    """All subscribers; `threads` replaces their own number of threads."""
    invoker = InboxInvoker(lease_seconds=lease_seconds)
    return ConsumerRuntime(
        broker_database(get_settings()),
        [
            (replace(item.subscription, threads=threads or item.subscription.threads), item.handler)
            for item in registry.subscribers()
        ],
        invoker=invoker,
        share=invoker.share,
        sharing_calls=16,
        lease_seconds=lease_seconds,
    ).run


def send(count: int, *, queues: int = 2) -> None:
    postgres_broker().declare([Topic(name="orders", queue_count=queues)])
    postgres_broker().send([Message(topic="orders", body=b"{}", key=str(number)) for number in range(count)])


class Noted:
    """The transactions of the handlers, by message."""

    def __init__(self) -> None:
        self.transactions: dict[str, int] = {}

    def note(self, given: Delivery) -> None:
        self.transactions[given.key] = transaction_id()

    @property
    def largest(self) -> int:
        return max(Counter(self.transactions.values()).values())


def each_once(count: int) -> None:
    eventually(lambda: len(set(effects())) == count, within_seconds=40, what=lambda: str(len(effects())))
    assert sorted(effects()) == sorted(map(str, range(count)))


def failed() -> list[str]:
    return [
        key
        for (key,) in execute(
            "SELECT l.key FROM outbox.failure f JOIN outbox.commit_log l USING (log_id)", alias="broker"
        )
    ]


# -- connections -----------------------------------------------------------------------------------

POOL = {"min_size": 2, "max_size": 8}


@pytest.mark.usefixtures("calls_share")
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"CONN_MAX_AGE": 3600, "CONN_HEALTH_CHECKS": True}, True),
        ({"CONN_MAX_AGE": 0, "OPTIONS": {"pool": POOL}}, True),
        ({"OPTIONS": {"isolation_level": 3}}, False),
        ({"OPTIONS": {"options": "-c default_transaction_isolation=serializable"}}, False),
        ({"OPTIONS": {"server_side_binding": True}}, True),
    ],
    ids=["health-checks", "pool", "isolation", "isolation-of-session", "binding"],
)
def test_connection_settings(options: dict[str, Any], shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    handle_with(noted.note)
    send(60)
    # The connections of the consumer's threads are made with these settings. The connection of this thread is open,
    # unless it must come from the pool, too.
    assert effects() == []
    is_pool = "pool" in options.get("OPTIONS", {})
    if is_pool:
        connection.close()
    with monkeypatch.context() as patch:
        for key, value in options.items():
            patch.setitem(connections.settings["default"], key, value)
        try:
            with running(leading(), consuming()):
                each_once(60)
        finally:
            if is_pool:
                connection.close()
                connection.close_pool()  # type: ignore[attr-defined]
    assert (noted.largest > 1) is shares
    # Transactions of a stricter isolation level may stop each other; their messages are then delivered again.
    assert failed() == [] or not shares


@pytest.mark.usefixtures("calls_share")
@pytest.mark.skipif(OLD.program is None, reason="PgBouncer is not installed")
def test_a_pooler_in_transaction_mode(server_url: str, outbox_settings: Callable[..., None]) -> None:
    """Failing messages roll back to savepoints on the same session; nothing stays on a session of the pool."""
    outbox_settings(LISTEN_URL="")
    noted = Noted()

    def handle(given: Delivery) -> None:
        noted.note(given)
        if given.key in ("33", "66") and given.attempt == 1:
            raise Refused

    @subscriber("orders", group="effects", threads=3, retry=RetryPolicy(delays_seconds=[0.1]))
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        handle(given)

    with behind(server_url, OLD, size=3):
        send(150)
        with running(leading(), consuming()):
            each_once(150)
        for _ in range(6):
            with transaction.atomic():
                found = [setting(name) for name in ("lock_timeout", "statement_timeout")]
            assert found == ["0", "0"]
    assert noted.largest > 1


# -- statements that hang --------------------------------------------------------------------------


def sleep(seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(%s)", [seconds])


@pytest.mark.usefixtures("calls_share")
def test_a_statement_that_hangs_delays_the_earlier_messages_a_moment_only() -> None:
    handle_with(lambda given: sleep(1.5) if given.key == "slow" else None)
    given = deliveries("a", "slow", "later")
    began = time.monotonic()
    assert share(*given)[0] == [HANDLED, ALONE]
    assert time.monotonic() - began < 1.4
    assert effects() == ["a"]
    # Alone, the statement has all its time.
    assert alone(given[1]) is HANDLED


@pytest.mark.usefixtures("calls_share")
def test_a_shorter_limit_of_the_project_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str] = []
    handle_with(lambda given: limits.append(setting("statement_timeout")))
    given = deliveries(*"abcdef")
    assert share(*given[:3])[0] == [HANDLED] * 3
    assert limits == ["0", "500ms", "500ms"]
    for limit in ("200ms", "1min"):
        limits.clear()
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"options": f"-c statement_timeout={limit}"})
        with contextlib.suppress(OperationalError):
            assert share(*deliveries("x", "y", "z"))[0] == [HANDLED] * 3
        expected = "200ms" if limit == "200ms" else "500ms"
        assert limits == [limit, expected, expected]
    connection.close()


@pytest.mark.usefixtures("calls_share")
def test_commit_has_no_limit() -> None:
    """A deferred trigger, or a replica that must confirm, may take longer than a statement of a joined message."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(0.8); RETURN NULL; END';"
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON shop_payment DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION slow_commit()"
        )
    try:
        handle_with(lambda given: Payment.objects.create(reference="b") if given.key == "b" else None)
        assert share(*deliveries("a", "b"))[0] == [HANDLED] * 2
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION slow_commit CASCADE")


@pytest.mark.usefixtures("calls_share")
@pytest.mark.parametrize("hang", [sleep, time.sleep], ids=["statement", "python"])
def test_a_handler_that_hangs_charges_and_delays_no_other_message(hang: Callable[[float], None]) -> None:
    """The others of its transaction are handled long before a statement ends; when the process gives a handler up that
    hangs in Python, the server ends its transaction."""

    @subscriber("orders", group="effects", threads=2, timeout_seconds=1, retry=RetryPolicy(delays_seconds=[30]))
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "30" and given.attempt == 1:
            hang(8)

    send(60, queues=1)
    with running(leading(), consuming(lease_seconds=4)):
        began = time.monotonic()
        eventually(lambda: len(set(effects())) == 59, within_seconds=30, what=lambda: str(len(effects())))
        assert time.monotonic() - began < 7
        eventually(lambda: failed() == ["30"])
    assert failed() == ["30"]
    assert len(effects()) == 59


@pytest.mark.usefixtures("calls_share")
def test_a_callback_that_hangs_charges_no_other_message() -> None:
    """Each callback runs within the time limit of its own message."""
    hung: list[str] = []
    groups: list[int] = []
    release = threading.Event()

    def hang(key: str) -> None:
        hung.append(key)
        release.wait(8)

    @subscriber("orders", group="effects", timeout_seconds=1, threads=1)
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        groups.append(transaction_id())
        # It is the second message of a transaction.
        if groups.count(groups[-1]) == 2 and not hung:
            transaction.on_commit(functools.partial(hang, given.key))

    send(60, queues=1)
    with running(leading(), consuming()):
        eventually(lambda: len(set(effects())) == 60 and bool(hung), within_seconds=15)
        # Longer than the time limit: the process has given the callback up.
        eventually(lambda: failed() != [], within_seconds=10)
        release.set()
    assert failed() == hung


# -- stops and deaths ------------------------------------------------------------------------------

NOTES = {"TOPICS": {"notes": {"queue_count": 2}}, "MESSAGES_PER_COMMIT": 16}
NOTING: dict[str, Any] = {"outbox": NOTES, "subscribers": "effects.noting"}


def send_notes(count: int) -> None:
    postgres_broker().declare([Topic(name="notes", queue_count=2)])
    postgres_broker().send([Message(topic="notes", body=b"{}", key=str(number)) for number in range(count)])


def notes_once(count: int) -> None:
    made = [number.split(":") for number in effects()]
    assert Counter(key for key, _ in made) == Counter(map(str, range(count)))
    assert max(Counter(own for _, own in made).values()) > 1, "no transaction was shared"


@pytest.mark.usefixtures("calls_share")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigterm_in_the_middle_of_shared_transactions() -> None:
    count = 400
    send_notes(count)
    with child("broker", **NOTING, quiet=True):
        slow = "consumer.before_inbox_commit=delay:0.01"
        for least in (30, 150):
            with child("consumer", **NOTING, quiet=True, faults=slow) as stopping:
                eventually(lambda least=least: len(effects()) > least, within_seconds=40)  # type: ignore[misc]
                stopping.send_signal(signal.SIGTERM)
                assert stopping.wait(20) == 0
            # All offsets are stored, so nothing is delivered again.
            assert unstored() == 0
        with child("consumer", **NOTING, quiet=True):
            eventually(lambda: len(effects()) >= count, within_seconds=60)
    notes_once(count)
    assert failed() == []


def unstored() -> int:
    """The number of handled messages whose offset is not stored."""
    [(stored,)] = execute(
        "SELECT sum(stored) FROM (SELECT max(next_offset) AS stored FROM outbox.consumer_offset"
        " GROUP BY group_id, queue_id) AS positions",
        alias="broker",
    )
    return len(effects()) - int(stored)


@pytest.mark.usefixtures("calls_share")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param("before_handler=kill@42", marks=pytest.mark.slow),
        "before_inbox_commit=kill@9",
        pytest.param("after_inbox_commit=kill@9", marks=pytest.mark.slow),
        pytest.param("before_offset=kill@2", marks=pytest.mark.slow),
    ],
)
def test_sigkill(kill: str) -> None:
    """Between two handlers, before COMMIT, after COMMIT, and before the offsets are stored."""
    count = 200
    send_notes(count)
    with child("broker", **NOTING, quiet=True):
        with child("consumer", **NOTING, faults=f"consumer.{kill}", quiet=True) as victim:
            assert victim.wait(60) == -signal.SIGKILL
        with child("consumer", **NOTING, quiet=True):
            eventually(lambda: len(effects()) >= count, within_seconds=60)
    notes_once(count)


def is_still() -> bool:
    before = len(effects())
    time.sleep(0.5)
    return len(effects()) == before


@pytest.mark.usefixtures("calls_share")
def test_a_queue_that_a_failure_stops() -> None:
    @subscriber("orders", group="effects", threads=2, on_error={Refused: OnError.STOP})
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "40" and not resumed:
            raise Refused

    resumed: list[int] = []
    send(100, queues=1)
    with running(leading(), consuming()):
        eventually(lambda: "39" in effects(), within_seconds=30)
        eventually(lambda: is_still(), within_seconds=30)
        assert "40" not in effects()
        assert len(effects()) == len(set(effects())) < 100
        resumed.append(1)
        assert say("outbox_group resume effects")[0]
        each_once(100)


@pytest.mark.usefixtures("calls_share")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rebalance_in_the_middle() -> None:
    """A second process joins, the first one leaves: each effect is there once, and no message fails."""
    handle_with(lambda given: time.sleep(0.002))
    count = 1200
    send(count, queues=4)
    with running(leading()):
        with running(consuming(lease_seconds=2)):
            eventually(lambda: len(effects()) > 100, within_seconds=40)
            with running(consuming(lease_seconds=2)):
                eventually(lambda: len(effects()) > 500, within_seconds=40)
        assert len(effects()) < count
        with running(consuming(lease_seconds=2)):
            each_once(count)
    assert failed() == []


@pytest.mark.usefixtures("calls_share")
@pytest.mark.slow
def test_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After errors, failed commits and callbacks with errors, each counter of the threads is at zero."""
    pools: list[SubscriptionCalls] = []
    original = SubscriptionCalls.__init__

    def made(self: SubscriptionCalls, *arguments: Any, **options: Any) -> None:
        pools.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(SubscriptionCalls, "__init__", made)
    monkeypatch.setattr("outbox.broker.consumer.call._PAUSES", SimpleNamespace(pause_seconds=lambda _: 0.01))

    @subscriber("orders", group="effects", threads=3, retry=RetryPolicy(delays_seconds=[0.05, 0.05]))
    def effect(given: Delivery) -> None:
        number = int(given.key)
        Effect.objects.create(number=given.key)
        if number % 37 == 5 and given.attempt == 1:
            raise Refused
        if number % 41 == 7 and given.attempt == 1:
            Payment.objects.create(reference="same")
            Payment.objects.create(reference="same")
        if number % 29 == 3:
            transaction.on_commit(refuse)

    def refuse() -> None:
        raise Refused

    count = 900
    send(count)
    with running(leading(), consuming()):
        each_once(count)
        [pool] = pools
        eventually(
            lambda: (pool.in_hand, pool.serving, len(pool.waiting), pool.stuck) == (0, 0, 0, 0),
            what=lambda: str((pool.in_hand, pool.serving, len(pool.waiting), pool.stuck)),
        )


@pytest.mark.usefixtures("calls_share")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_only_the_guilty_message_of_a_death_is_suspected() -> None:
    """Message 40 kills its process in a callback, when its transaction has committed. Message 77 kills it always."""
    count = 200
    send_notes(count)
    suspected: set[str] = set()

    def quarantined() -> set[str]:
        suspected.update(
            key
            for (key,) in execute(
                "SELECT l.key FROM outbox.quarantined_message JOIN outbox.commit_log l USING (log_id)", alias="broker"
            )
        )
        return suspected

    with process(["-m", "django", "outbox_worker"], outbox=NOTES, subscribers="effects.dying", quiet=True):
        eventually(lambda: "77" in quarantined(), within_seconds=60, what=lambda: str(suspected))
        # The others do not wait until message 77 has killed three processes more.
        eventually(
            lambda: quarantined() and len(effects()) >= count - 1, within_seconds=60, what=lambda: str(len(effects()))
        )
    made = [number.split(":") for number in effects()]
    assert Counter(key for key, _ in made) == Counter(str(n) for n in range(count) if n != 77)
    assert max(Counter(own for _, own in made).values()) > 1, "no transaction was shared"
    # A message that was alone in its transaction is noted until its callbacks have ended. The inbox skips it then.
    assert suspected <= {"40", "77"}
    assert set(failed()) <= {"77"}
