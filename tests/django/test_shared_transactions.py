"""Handlers that share a transaction: each effect happens once, and only the guilty message is charged.

tests/mistakes runs random handlers in the same way (the side "sharing").
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import IntegrityError, connection, connections, transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.errors import RetryLater
from outbox.hooks import Option
from outbox.ports import Disposition, RunAlone
from outbox.utils import fence
from tests.django.effects.own_transaction import transaction_id
from tests.django.sharing import Waiting
from tests.django.shop.models import Effect, Order, Payment
from tests.django.state import stored
from tests.django.test_inbox import delivery, effects
from tests.django.urls import Refused

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
    given = deliveries("a", "b", "c")
    assert alone(given[1]) is HANDLED
    assert share(*given)[0] == [HANDLED, SKIPPED, HANDLED]
    assert share(*given)[0] == [SKIPPED] * 3
    assert effects() == ["a", "b", "c"]


def test_a_message_that_a_later_generation_has_handled_is_skipped() -> None:
    handle_with(lambda given: None)
    given = deliveries("a", "b", "c")
    assert alone(given[1], generation=2) is HANDLED
    assert share(*given)[0] == [HANDLED, SKIPPED, HANDLED]
    assert effects() == ["a", "b", "c"]


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


def test_reading_from_another_database_does_not_end_the_sharing() -> None:
    handle_with(lambda given: Effect.objects.using("other").count())
    assert share(*deliveries("a", "b"))[0] == [HANDLED] * 2


def test_a_handler_without_inbox_does_not_share() -> None:
    @subscriber("orders", group="effects", idempotent=False)
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)

    results, more = share(*deliveries("a", "b"))
    assert results == [HANDLED]
    assert "no inbox" in more.ended[0]


def test_sharing_needs_read_committed() -> None:
    """In another isolation level, all handlers would see the database as it was for the first."""
    with connections["broker"].cursor() as cursor:
        name = connections["default"].settings_dict["NAME"]
        cursor.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
        try:
            connections["default"].close()
            handle_with(lambda given: None)
            assert share(*deliveries("a", "b"))[0] == [HANDLED]
        finally:
            cursor.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
            connections["default"].close()


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


def test_a_commit_by_hand_keeps_what_it_has_committed(caplog: pytest.LogCaptureFixture) -> None:
    """The inbox row of a message is written only when its turn comes, so nothing unhandled counts as handled."""

    def commit(given: Delivery) -> None:
        if given.key == "b":
            connection.connection.execute("COMMIT")
            raise Refused

    handle_with(commit)
    given = deliveries("a", "b", "c")
    results, more = share(*given)
    assert results[0] is HANDLED
    assert "ended its transaction by hand" in str(results[1])
    assert [one.key for one in more.waiting] == ["c"]
    assert effects() == ["a", "b"]
    assert alone(given[2]) is HANDLED


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
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                Order.objects.filter(number=number).update(status="held")
                held.set()
                release.wait(30)
        finally:
            connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        yield
    finally:
        release.set()
        thread.join()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield
