"""A subscription with limits in one process: calls at the same time, calls of one key, messages per time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from outbox.contrib.limits import Limits
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.bench import FIFO, ConsumptionBench, encode, keyed
from tests.support import eventually


class Overlaps:
    """Records the greatest number of calls that ran at the same time, over all keys and of one key.

    With `until`, each call waits until this holds once, so that calls overlap without luck.
    """

    def __init__(
        self, seconds: float = 0.005, fail: int = 0, until: Callable[[Overlaps], bool] = lambda overlaps: True
    ) -> None:
        self._seconds = seconds
        self._fail = fail
        self._until = until
        self._held = False
        self._lock = threading.Condition()
        self._pause = threading.Event()
        self._keys: Counter[str] = Counter()
        self.most = 0
        self.most_of_key = 0
        self.handled: list[tuple[str, int]] = []
        self.attempts: Counter[int] = Counter()

    def __call__(self, delivery: Delivery) -> None:
        with self._lock:
            self._keys[delivery.key] += 1
            self.most = max(self.most, self._keys.total())
            if delivery.key:
                self.most_of_key = max(self.most_of_key, self._keys[delivery.key])
            self._held = self._held or self._until(self)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: self._held, 30), "the calls that should overlap never did"
        try:
            self._pause.wait(self._seconds)
            with self._lock:
                self.attempts[delivery.attempt] += 1
            if delivery.attempt <= self._fail:
                raise ValueError(f"attempt {delivery.attempt} of {delivery.message_id}")
        finally:
            with self._lock:
                self._keys[delivery.key] -= 1
        with self._lock:
            self.handled.append((delivery.key, delivery.body["n"]))


def limited(limits: Limits, **options: object) -> Subscription:
    values = {"group": "g", "topic": "orders", "threads": 8, "retry": RetryPolicy(delays_seconds=[0.05]), **options}
    return Subscription(options=[limits], **values)  # type: ignore[arg-type]


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=4)
    return bench


@pytest.mark.parametrize("mode", list(Mode))
def test_no_more_calls_run_than_the_limit(bench: ConsumptionBench, mode: Mode) -> None:
    bench.declare("orders", queues=4, types=FIFO)
    overlaps = Overlaps(until=lambda overlaps: overlaps.most == 3)
    bench.publish(keyed("orders", 200, 20))
    bench.run_until_idle(limited(Limits(running=3), mode=mode), overlaps)
    assert overlaps.most == 3
    assert len(overlaps.handled) == 200
    bench.assert_conserved("g")


def test_control_without_limits_all_threads_run(orders: ConsumptionBench) -> None:
    overlaps = Overlaps(until=lambda overlaps: overlaps.most == 8)
    orders.publish(keyed("orders", 200, 3))
    orders.run_until_idle(Subscription(group="g", topic="orders", threads=8), overlaps)
    assert overlaps.most == 8
    assert overlaps.most_of_key > 1


@pytest.mark.parametrize("per_key", [1, 2])
def test_no_more_calls_of_a_key_run_than_the_limit(orders: ConsumptionBench, per_key: int) -> None:
    # Three keys and eight threads: all keys reach the limit at once.
    overlaps = Overlaps(until=lambda overlaps: overlaps.most_of_key >= per_key and overlaps.most > per_key)
    orders.publish(keyed("orders", 200, 3))
    orders.run_until_idle(limited(Limits(per_key=per_key)), overlaps)
    assert overlaps.most_of_key == per_key
    assert overlaps.most > per_key
    assert len(overlaps.handled) == 200
    orders.assert_conserved("g")


def test_retries_obey_the_limit_of_their_key(orders: ConsumptionBench) -> None:
    overlaps = Overlaps(fail=1)
    orders.publish(keyed("orders", 60, 3))
    with orders.sequencing(), orders.running((limited(Limits(per_key=1)), overlaps)):
        eventually(lambda: len(overlaps.handled) == 60)
        eventually(lambda: orders.lag("g") == 0)
    assert overlaps.most_of_key == 1
    assert overlaps.attempts == {1: 60, 2: 60}
    orders.assert_conserved("g")


def test_keys_are_served_in_turn(orders: ConsumptionBench) -> None:
    """300 messages of one key are queued before a message of each of ten other keys."""
    overlaps = Overlaps(0.0)
    orders.publish(keyed("orders", 300, 1))
    orders.publish([Message(topic="orders", key=f"other {n}", body=encode({"n": n})) for n in range(10)])
    orders.run_until_idle(limited(Limits(running=1, per_key=1), threads=1), overlaps)
    assert len(overlaps.handled) == 310
    places = [place for place, (key, _) in enumerate(overlaps.handled) if key != "k0"]
    assert max(places) < 200
    assert [n for key, n in overlaps.handled if key == "k0"] == list(range(300))


def test_messages_start_at_the_rate_after_the_burst(orders: ConsumptionBench) -> None:
    began: list[float] = []

    def handle(delivery: Delivery) -> None:
        began.append(time.monotonic())

    orders.publish([Message(topic="orders", body=encode({"n": n})) for n in range(60)])
    with orders.running((limited(Limits(rate="20/s", burst=20)), handle)):
        eventually(lambda: len(began) == 60)
    took = sorted(began)[-1] - sorted(began)[0]
    # 20 messages at once, and the others within 40/20 s. The machine may stop, so there is no upper bound.
    assert took >= 1.95


def test_waiting_blocks_no_other_subscription(orders: ConsumptionBench) -> None:
    orders.declare("mail")
    seen: list[int] = []
    slow: list[int] = []
    orders.publish([Message(topic=topic, body=encode({"n": n})) for n in range(100) for topic in ("orders", "mail")])
    other = Subscription(group="other", topic="mail")
    with orders.running(
        (limited(Limits(rate="1/h")), lambda delivery: slow.append(1)),
        (other, lambda delivery: seen.append(1)),
    ):
        eventually(lambda: len(seen) == 100)
        assert len(slow) <= 1
    assert orders.lag("g") >= 99
    orders.assert_conserved("g")


def test_a_handler_past_its_timeout_still_counts(orders: ConsumptionBench) -> None:
    """Python cannot stop a handler. While it runs on, its slot is not free."""
    overlaps, hang, hangs = Overlaps(0.0), threading.Event(), threading.Event()

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 0 and delivery.attempt == 1:
            hangs.set()
            assert hang.wait(20)
        else:
            assert not hangs.is_set() or hang.is_set()
            overlaps(delivery)

    subscription = limited(Limits(running=1), timeout_seconds=0.3)
    with orders.sequencing(), orders.running((subscription, handle)):
        orders.publish([Message(topic="orders", body=encode({"n": 0}))])
        assert hangs.wait(20)
        eventually(lambda: orders.retrying() or orders.rows("SELECT 1 FROM outbox.failure"))
        orders.publish([Message(topic="orders", body=encode({"n": n})) for n in range(1, 5)])
        eventually(lambda: orders.rows("SELECT 1 FROM outbox.slot_demand WHERE waiting_for = 'running'"))
        assert overlaps.handled == []
        hang.set()
        eventually(lambda: len(overlaps.handled) == 5)


def test_the_slot_of_a_handler_past_its_timeout_stays_with_its_process(orders: ConsumptionBench) -> None:
    """The process has no other message. If it released the slot, another process would call a handler beside this."""
    hang = threading.Event()

    def handle(delivery: Delivery) -> None:
        assert hang.wait(30)

    orders.publish([Message(topic="orders", body=encode({"n": 0}))])
    subscription = limited(Limits(running=1), timeout_seconds=0.3, retry=RetryPolicy(delays_seconds=[3600]))
    with orders.running((subscription, handle)):
        try:
            eventually(lambda: orders.rows("SELECT 1 FROM outbox.failure"))
            [(until,)] = orders.rows("SELECT expires_at FROM outbox.slot_demand")
            later = "SELECT 1 FROM outbox.slot_demand WHERE expires_at > %s::timestamptz + interval '3 seconds'"
            eventually(lambda: orders.rows(later, until), what="several renewals after the timeout")
            assert orders.rows("SELECT key, number FROM outbox.slot") == [("", 1)]
        finally:
            hang.set()


def test_a_key_waits_for_a_handler_past_its_timeout(orders: ConsumptionBench) -> None:
    """The second message of the key waits in the process, and the third one is the second attempt of the first."""
    hang, hangs = threading.Event(), threading.Event()
    overlaps = Overlaps(0.0)

    def handle(delivery: Delivery) -> None:
        if (delivery.key, delivery.body["n"], delivery.attempt) == ("a", 0, 1):
            hangs.set()
            assert hang.wait(30)
        else:
            overlaps(delivery)

    orders.publish([Message(topic="orders", key="a", body=encode({"n": n})) for n in range(2)])
    with orders.sequencing(), orders.running((limited(Limits(per_key=1), timeout_seconds=3), handle)):
        try:
            assert hangs.wait(20)
            eventually(lambda: orders.rows("SELECT 1 FROM outbox.failure"))
            orders.publish([Message(topic="orders", key="b", body=encode({"n": 0}))])
            eventually(lambda: overlaps.handled)
            assert overlaps.handled == [("b", 0)]
        finally:
            hang.set()
        eventually(lambda: len(overlaps.handled) == 3)
        eventually(lambda: orders.lag("g") == 0)
    orders.assert_conserved("g")
