"""A poison message among others is found; a service that is down costs no attempts."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from outbox.broker.consumer import results
from outbox.broker.consumer.owned_queue import Phase
from outbox.broker.consumer.results import Outage
from outbox.broker.database.statement import Statement
from outbox.broker.operations import dead_letters
from outbox.errors import HandlerNotStarted, PermanentError
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler, Disposition
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench, encode
from tests.support import eventually

# Waits of 0.02 s, and patience for 20 s of outage.
PATIENT = RetryPolicy(delays_seconds=[0.02], max_attempts=1_000)


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


def subscribe(**options: Any) -> Subscription:
    return Subscription(**{"group": "g", "topic": "orders", "retry": AT_ONCE, **options})


def messages(count: int, *, keys: int = 3) -> list[Message]:
    return [Message(topic="orders", key=f"k{n % keys}", body=encode({"n": n})) for n in range(count)]


def numbers(given: Delivery | Sequence[Delivery]) -> list[int]:
    return [delivery.body["n"] for delivery in ([given] if isinstance(given, Delivery) else given)]


class World:
    """A handler that fails while what it needs is away, and always for poison; its calls and what took effect."""

    def __init__(self, *, away: bool = False, poison: Sequence[int] = ()) -> None:
        self.back = threading.Event()
        if not away:
            self.back.set()
        self.poison = set(poison)
        self.calls: list[list[int]] = []
        self.handled: Counter[int] = Counter()

    def __call__(self, given: Any) -> None:
        ns = numbers(given)
        self.calls.append(ns)
        if not self.back.is_set():
            raise ConnectionError("could not connect to the warehouse")
        if self.poison & set(ns):
            raise ValueError("cannot read the order")
        self.handled.update(ns)


# -- a poison message in a batch --------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_a_poison_message_takes_none_of_its_batch_along(orders: ConsumptionBench, mode: Mode) -> None:
    world = World(poison=[4])
    sent = messages(10)
    orders.publish(sent)
    subscription = subscribe(mode=mode, batch=10, max_suspends=2, suspend_seconds=0.0)
    with orders.sequencing(), orders.running((subscription, world)):
        eventually(lambda: dead_letters.list_dead_letters(orders.run))
        eventually(lambda: orders.lag("g") == 0)
    assert [(letter.message_id, letter.attempts) for letter in dead_letters.list_dead_letters(orders.run)] == [
        (sent[4].message_id, 3)
    ]
    assert world.handled == Counter(n for n in range(10) if n != 4)
    # No other message has a failed attempt.
    assert orders.rows("SELECT count(DISTINCT log_id) FROM outbox.failure") == [(1,)]
    orders.assert_conserved("g")


def test_a_batch_is_halved_until_the_poison_message_is_alone(orders: ConsumptionBench) -> None:
    def fail(deliveries: Any) -> None:
        calls.append(numbers(deliveries))
        if 0 in calls[-1]:
            raise PermanentError("cannot read the order")

    calls: list[list[int]] = []
    orders.declare("single", queues=1)
    orders.publish([Message(topic="single", body=encode({"n": n})) for n in range(16)])
    orders.runtime((subscribe(topic="single", batch=16, threads=1), fail)).run_once()
    assert sorted(map(len, calls)) == [1, 1, 2, 2, 4, 4, 8, 8, 16]
    assert len(dead_letters.list_dead_letters(orders.run)) == 1
    orders.assert_conserved("g")


# -- a service that is down -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "batch"), [(Mode.CONCURRENT, 64), (Mode.ORDERLY, 1), (Mode.KEY_ORDERED, 64)])
def test_an_outage_uses_up_no_attempts(orders: ConsumptionBench, mode: Mode, batch: int) -> None:
    world = World(away=True)
    orders.publish(messages(200, keys=100))
    subscription = subscribe(mode=mode, batch=batch, threads=2, retry=PATIENT, suspend_seconds=0.0)
    with orders.sequencing(), orders.running((subscription, world)):
        (seen,) = eventually(lambda: orders.rows("SELECT error FROM outbox.outage"))
        assert seen[0].startswith("ConnectionError: could not connect to the warehouse")
        # It is tried again and again, one call at a time.
        before = len(world.calls)
        eventually(lambda: len(world.calls) > before + 5)
        # The first two of three failures in a row may have counted as attempts; more than one, while there was no other
        # message to tried; of the other 198 none.
        assert orders.rows("SELECT count(DISTINCT log_id) <= 2 FROM outbox.failure") == [(True,)]
        world.back.set()
        eventually(lambda: len(world.handled) == 200)
        eventually(lambda: not orders.rows("SELECT 1 FROM outbox.outage"))
    assert set(world.handled.values()) == {1}
    assert dead_letters.list_dead_letters(orders.run) == []


def test_an_outage_is_recognised_after_few_calls_for_any_size_of_batch(orders: ConsumptionBench) -> None:
    """And not first after a batch of 500 is halved to single messages: each call may cost a timeout."""
    world = World(away=True)
    orders.declare("single", queues=1)
    orders.publish([Message(topic="single", body=encode({"n": n})) for n in range(500)])
    policy = RetryPolicy(delays_seconds=[3600])
    orders.runtime((subscribe(topic="single", batch=500, threads=1, retry=policy), world)).run_once()
    assert len(world.calls) <= 6
    assert orders.rows("SELECT count(*) FROM outbox.failure") == [(0,)]


def test_a_service_that_fails_at_two_lines_of_a_handler_is_an_outage(
    orders: ConsumptionBench, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(delivery: Delivery) -> None:
        calls.append(delivery)
        if len(calls) % 2:
            json.loads("away")
        json.loads("away")

    calls: list[Delivery] = []
    orders.declare("single", queues=1)
    orders.publish([Message(topic="single", body=encode({"n": n})) for n in range(12)])
    policy = RetryPolicy(delays_seconds=[3600])
    orders.runtime((subscribe(topic="single", threads=1, retry=policy), ask)).run_once()
    assert len(calls) < 12, "the subscription pauses"
    [told, *_] = [record.getMessage() for record in caplog.records if "seems to be down" in record.getMessage()]
    assert "raised in ask," in told, "the line of the handler is shown"


def test_poison_alone_in_the_world_ends_in_the_dead_letters(orders: ConsumptionBench) -> None:
    """Alone it looks like an outage; that is assumed no longer than a series of attempts takes."""
    world = World(poison=range(4))
    orders.publish(messages(4))
    policy = RetryPolicy(delays_seconds=[0.05], max_attempts=3)
    with orders.sequencing(), orders.running((subscribe(retry=policy), world)):
        eventually(lambda: len(dead_letters.list_dead_letters(orders.run)) == 4)
        eventually(lambda: orders.lag("g") == 0)
    orders.assert_conserved("g")


def test_poison_among_others_counts_although_it_comes_in_a_row(orders: ConsumptionBench) -> None:
    world = World(poison=range(4))
    orders.publish(messages(40))
    policy = RetryPolicy(delays_seconds=[0.02] * 2 + [600], max_attempts=3)
    with orders.sequencing(), orders.running((subscribe(retry=policy, threads=1), world)):
        eventually(lambda: len(dead_letters.list_dead_letters(orders.run)) == 4)
    assert world.handled == Counter(range(4, 40))


@pytest.mark.parametrize("batch", [1, 10])
def test_messages_that_fail_among_others_delay_none_of_them(
    orders: ConsumptionBench, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A trigger refuses a third of the orders. Their retries come together, and some are refused one after another."""
    chance = random.Random(3)
    poison = [n for n in range(20, 200) if chance.random() < 1 / 3]
    world = World(poison=poison)
    policy = RetryPolicy(delays_seconds=[0.1], max_attempts=1_000)
    sent = messages(200)
    orders.publish(sent[:20])
    with orders.sequencing(), orders.running((subscribe(retry=policy, batch=batch, threads=2), world)):
        eventually(lambda: len(world.handled) == 20)
        for start in range(20, 200, 20):
            orders.publish(sent[start : start + 20])
            eventually(lambda start=start: len(world.handled) == len({*range(start + 20)} - world.poison))  # type: ignore[misc]
        retries = len(world.calls)
        eventually(lambda: len(world.calls) > retries + 2 * len(poison), what="the next retries of all")
        assert orders.rows("SELECT 1 FROM outbox.outage") == []
    assert set(world.handled.values()) == {1} and not world.poison & world.handled.keys()
    assert not [one for one in caplog.records if "seems to be down" in one.getMessage()], "the subscription pauses"
    assert orders.rows("SELECT 1 FROM outbox.incident WHERE kind = 'outage'") == []


def test_poison_in_every_batch_is_no_lasting_outage(orders: ConsumptionBench) -> None:
    """The first batches of a process fail, and the subscription pauses; then each call is half as large."""
    world = World(poison=range(0, 60, 5))
    orders.publish(messages(60))
    with orders.sequencing(), orders.running((subscribe(retry=PATIENT, batch=10, threads=1), world)):
        eventually(lambda: len(world.handled) == 48)
        eventually(lambda: orders.rows("SELECT 1 FROM outbox.outage") == [])


def test_a_constraint_that_fails_is_no_outage(orders: ConsumptionBench) -> None:
    """The database has answered: each message uses up its attempts, and no subscription pauses."""
    sent = messages(4)
    orders.publish(sent)

    def refused(delivery: Delivery) -> None:
        raise psycopg.errors.UniqueViolation("duplicate key value violates unique constraint")

    def least_attempts() -> int:
        rows = orders.run.rows(Statement("SELECT log_id, max(attempt) FROM {schema}.failure GROUP BY log_id"))
        return min((attempt for _, attempt in rows), default=0) if len(rows) == len(sent) else 0

    with orders.sequencing(), orders.running((subscribe(retry=PATIENT), refused)):
        eventually(lambda: least_attempts() >= 5)
        assert orders.run.rows(Statement("SELECT * FROM {schema}.outage")) == []


def test_what_is_in_a_row() -> None:
    outage = Outage(subscribe(retry=RetryPolicy()))
    assert outage.failed("w", "E: other", -2.0) is None
    assert outage.failed("ab", "E: away", -1.0) is None
    assert outage.failed("cd", "E: away", 0.0) is None
    # The same messages again, halved or retried, say nothing new.
    assert outage.failed("a", "E: away", 0.0) is None
    assert outage.failed("a", "E: away", 0.0) is None
    assert outage.failed("b", "E: away", 0.0) == 1.0
    assert outage.since == -1.0, "the first failure with this error"
    assert not outage.admits(0.9, running=False) and not outage.admits(1.0, running=True)
    # One that ran already does not make the pause longer; one after it does.
    assert outage.failed("x", "E: away", 0.5) == 1.0
    assert outage.failed("x", "E: away", 1.0) == 3.0
    assert outage.failed("x", "F: other", 4.0) is None
    assert outage.error == "" and not outage.has_succeeded, "the service may still be down"
    outage.succeeded(5.0)
    assert outage.has_succeeded
    assert outage.admits(0.0, running=True) and outage.error == ""
    for name in "ab":
        assert outage.failed(name, "E: away", 0.0) is None
    assert outage.failed("c", "F: other", 0.0) is None


def test_messages_that_fail_among_others_are_no_outage() -> None:
    """Also if chance brings many of them in a row, and if their retries come together."""
    outage = Outage(subscribe(retry=RetryPolicy()))
    chance = random.Random(3)
    fails = [False, *(chance.random() < 1 / 3 for _ in range(10_000))]
    assert outage.failed("first", "E: refused", 0.0) is None
    for number, is_poison in enumerate(fails):
        if is_poison:
            assert outage.failed([number], "E: refused", number / 100) is None
            for back in range(4):
                assert outage.failed([number - back], "E: refused", number / 100, is_retried=True) is None
        else:
            outage.succeeded(number / 100)
    assert "111" in "".join(str(int(one)) for one in fails), "chance brings three in a row"


def test_a_service_that_fails_is_an_outage_after_three_first_attempts() -> None:
    outage = Outage(subscribe(retry=RetryPolicy()))
    outage.succeeded(0.0)
    assert outage.failed("a", "E: away", 1.0) is None
    # Retries neither belong to the series nor end it.
    assert outage.failed("r", "F: refused", 1.0, is_retried=True) is None
    assert outage.failed("b", "E: away", 1.0) is None
    assert outage.failed("s", "E: away", 1.0, is_retried=True) is None
    assert outage.failed("c", "E: away", 1.0) == 2.0
    # A probe with retries goes on with it.
    assert outage.failed("r", "E: away", 2.0, is_retried=True) == 4.0


def test_a_service_whose_error_a_success_has_refuted_is_an_outage_after_twenty() -> None:
    outage = Outage(subscribe(retry=RetryPolicy()))
    assert outage.failed("0", "E: away", 0.0) is None
    outage.succeeded(0.0)
    ends = [outage.failed([number], "E: away", 1.0) for number in range(20)]
    assert ends == [None] * 19 + [2.0]


def test_calls_in_hand_when_a_service_goes_down_do_not_delay_the_outage() -> None:
    """Eight calls began at 0; at 1 the service goes down, and one of them succeeds after the first failure."""
    outage = Outage(subscribe(retry=RetryPolicy()))
    outage.succeeded(0.5, 0.0)
    assert outage.failed("0", "E: away", 1.0) is None
    outage.succeeded(1.1, 0.0)
    assert [outage.failed(name, "E: away", 1.2) for name in "123"] == [None, None, pytest.approx(2.2)]


def test_a_call_that_began_after_a_failure_refutes_it_although_one_in_hand_has_succeeded_before() -> None:
    outage = Outage(subscribe(retry=RetryPolicy()))
    assert outage.failed("0", "E: away", 1.0) is None
    outage.succeeded(1.1, 0.0)
    outage.succeeded(1.3, 1.2)
    assert [outage.failed([number], "E: away", 2.0) for number in range(20)] == [None] * 19 + [3.0]


def test_three_in_a_row_suffice_if_messages_have_few_attempts() -> None:
    for attempts, needed in ((2, 3), (3, 20)):
        outage = Outage(subscribe(retry=RetryPolicy(max_attempts=attempts)))
        assert outage.failed("0", "E: away", 0.0) is None
        outage.succeeded(0.0)
        ends = [outage.failed([number], "E: away", 1.0) for number in range(needed)]
        assert ends == [None] * (needed - 1) + [2.0]


def test_a_duplicate_does_not_end_an_outage() -> None:
    """Its handler was not called."""
    work: Any = SimpleNamespace(items=[], started_at=None)
    outage = Outage(subscribe(retry=RetryPolicy()))
    assert outage.not_started("E: away", 0.0) == 1.0
    for result, error in ((Disposition.SKIPPED, "E: away"), (Disposition.HANDLED, "")):
        work.items = [SimpleNamespace(queue=Mock(phase=Phase.ACTIVE), offset=0)]
        results.book(work, [result], outage)
        assert outage.error == error


def test_retries_alone_are_an_outage_if_nothing_has_succeeded_for_a_minute() -> None:
    for seconds, began in ((0.0, None), (60.0, 0.0), (59.0, 0.0)):
        outage = Outage(subscribe(retry=RetryPolicy()))
        if began is not None:
            outage.succeeded(began)
        ends = [outage.failed(name, "E: away", seconds, is_retried=True) for name in "abc"]
        assert ends == [None, None, None if seconds == 59.0 else seconds + 1.0]


def test_retries_are_no_outage_if_a_success_has_ever_refuted_their_error() -> None:
    """No new message arrives, so only the messages that a trigger refuses are tried. A batch says more than a retry."""
    outage = Outage(subscribe(retry=RetryPolicy()))
    assert outage.failed("0", "E: refused", 0.0) is None
    outage.succeeded(0.0)
    assert [outage.failed([number], "E: refused", 100.0, is_retried=True) for number in range(50)] == [None] * 50
    assert [outage.failed([number], "E: refused", 200.0, is_batch=True) for number in range(3)] == [None, None, 201.0]


def test_an_outage_that_begins_again_within_a_minute_continues() -> None:
    for error, ended_at, again_at, since in (
        ("E: away", 59.0, 60.0, 0.0),
        ("E: away", 1.0, 61.0, 61.0),
        ("F: other", 59.0, 60.0, 60.0),
    ):
        outage = Outage(subscribe(retry=RetryPolicy()))
        for name in "abc":
            outage.failed(name, "E: away", 0.0)
        outage.succeeded(ended_at)
        assert outage.pauses == 0
        for name in "def":
            outage.failed(name, error, again_at)
        assert (outage.pauses, outage.since) == (1, since)


def test_a_pause_before_any_handler_is_at_most_ten_seconds() -> None:
    """A server that is back is noticed by an attempt to connect, which costs nothing."""
    outage = Outage(subscribe(retry=RetryPolicy()))
    ends = [outage.not_started("E: away", now) - now for now in range(1000, 8000, 1000)]
    assert outage.since == 1000
    assert ends == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]


def test_a_requested_pause_lasts_its_full_time() -> None:
    outage = Outage(subscribe(retry=RetryPolicy()))
    assert outage.unavailable("E: later", 0.0, 30.0) == 30.0
    # By calls that already ran when it was requested.
    outage.succeeded(1.0)
    assert outage.failed("a", "F: other", 2.0) == 30.0
    assert outage.unavailable("E: later", 3.0, 40.0) == 43.0
    assert not outage.admits(42.9, running=False) and outage.admits(43.0, running=False)
    outage.succeeded(43.1)
    assert outage.admits(43.1, running=True) and outage.error == ""


# -- before the handler has started -----------------------------------------------------------------


@pytest.mark.parametrize("is_partial", [True, False])
def test_what_cannot_begin_beside_others_uses_up_no_attempt(orders: ConsumptionBench, is_partial: bool) -> None:
    """Of a batch, one body cannot be read now. Its errors are objects of their own, also if nothing was handled."""
    tries: Counter[int] = Counter()
    back = threading.Event()

    def invoke(
        subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        results: list[Disposition | Exception] = []
        for number in numbers(deliveries):
            tries[number] += 1
            is_away = (number == 0 or not is_partial) and not back.is_set()
            results.append(HandlerNotStarted(f"no body of {number}") if is_away else Disposition.HANDLED)
        return results

    orders.publish(messages(4))
    policy = RetryPolicy(delays_seconds=[0.02], max_attempts=1)
    with orders.running((subscribe(batch=10, retry=policy), World()), invoker=invoke):
        eventually(lambda: tries[0] > 2)
        assert orders.rows("SELECT 1 FROM outbox.failure") == []
        back.set()
        eventually(lambda: orders.lag("g") == 0)
    assert dead_letters.list_dead_letters(orders.run) == []


@pytest.mark.parametrize(("mode", "batch"), [(Mode.CONCURRENT, 1), (Mode.ORDERLY, 10), (Mode.KEY_ORDERED, 1)])
def test_what_fails_before_the_handler_uses_up_no_attempt(orders: ConsumptionBench, mode: Mode, batch: int) -> None:
    class Invoker:
        def __init__(self) -> None:
            self.tries = 0
            self.open = threading.Event()

        def __call__(
            self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
        ) -> Sequence[Disposition | Exception]:
            self.tries += 1
            if not self.open.is_set():
                return [HandlerNotStarted("no connection")] * len(deliveries)
            handler(deliveries if batch > 1 else deliveries[0])  # type: ignore[arg-type]
            return [Disposition.HANDLED] * len(deliveries)

    invoker, world = Invoker(), World()
    orders.publish(messages(1))
    # Here one attempt would be all.
    policy = RetryPolicy(delays_seconds=[0.02], max_attempts=1)
    subscription = subscribe(mode=mode, batch=batch, retry=policy, max_suspends=0)
    with orders.running((subscription, world), invoker=invoker):
        eventually(lambda: invoker.tries > 5)
        assert orders.rows("SELECT error FROM outbox.outage") == [("HandlerNotStarted: no connection",)]
        assert world.calls == [] and orders.rows("SELECT 1 FROM outbox.failure") == []
        invoker.open.set()
        eventually(lambda: world.handled == Counter([0]))
    assert dead_letters.list_dead_letters(orders.run) == []
    assert orders.rows("SELECT 1 FROM outbox.outage") == []
