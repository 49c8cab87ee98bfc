"""Ordered messages: global and per-key order, failures in place, poisoned keys, memory."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from outbox.broker.consumer.lanes import FetchedEntry, OrderedLane
from outbox.broker.consumer.owned_queue import ConsumingGroup, OwnedQueue
from outbox.broker.database.executor import Executor
from outbox.broker.groups.leases import Lease
from outbox.broker.groups.offsets import Position
from outbox.broker.operations import dead_letters, progress
from outbox.errors import PermanentError, RetryLater
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, OnError, Subscription
from tests.broker.bench import FIFO, ConsumptionBench, encode, keyed
from tests.support import eventually

ORDERED = [Mode.ORDERLY, Mode.KEY_ORDERED]


class OrderHarness:
    """Records what a handler sees per key, and whether two calls for one key ever overlapped."""

    def __init__(self, fail: Callable[[Delivery], Exception | None] = lambda delivery: None) -> None:
        self._fail = fail
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self.overlaps = 0
        self.handled: defaultdict[str, list[int]] = defaultdict(list)
        self.attempts: Counter[tuple[str, int]] = Counter()

    def __call__(self, given: Any) -> None:
        for delivery in [given] if isinstance(given, Delivery) else given:
            self.one(delivery)

    def one(self, delivery: Delivery) -> None:
        key, n = delivery.key, delivery.body["n"]
        with self._lock:
            self.attempts[key, n] += 1
            self._running[key] += 1
            self.overlaps += self._running[key] > 1
        try:
            error = self._fail(delivery)
            if error is not None:
                raise error
            with self._lock:
                self.handled[key].append(n)
        finally:
            with self._lock:
                self._running[key] -= 1

    @property
    def total(self) -> int:
        return sum(map(len, self.handled.values()))

    def assert_order(self, keys: int, each: int) -> None:
        assert self.overlaps == 0
        assert len(self.handled) == keys
        assert [key for key, ns in self.handled.items() if ns != list(range(each))] == []


def subscribe(mode: Mode = Mode.ORDERLY, **options: Any) -> Subscription:
    return Subscription(**{"group": "g", "topic": "steps", "mode": mode, "suspend_seconds": 0.02, **options})


@pytest.fixture
def steps(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("steps", types=FIFO)
    return bench


def test_global_order_with_one_queue(bench: ConsumptionBench) -> None:
    bench.declare("single", queues=1)
    seen: list[int] = []
    bench.publish([Message(topic="single", body=encode({"n": n})) for n in range(500)])
    bench.run_until_idle(subscribe(topic="single"), lambda delivery: seen.append(delivery.body["n"]))
    assert seen == list(range(500))


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("mode", ORDERED)
def test_order_per_key_over_many_queues(steps: ConsumptionBench, mode: Mode, batch: int) -> None:
    harness = OrderHarness()
    steps.publish(keyed("steps", 1_500, 300))
    steps.run_until_idle(subscribe(mode, batch=batch), harness)
    harness.assert_order(300, 5)
    steps.assert_conserved("g")


def test_control_the_harness_notices_a_mode_without_order(steps: ConsumptionBench) -> None:
    """Concurrent handlers that take unequal time."""
    pause = threading.Event()

    def dawdle(delivery: Delivery) -> None:
        pause.wait(0.02 if delivery.body["n"] == 0 else 0)

    harness = OrderHarness(dawdle)
    steps.publish(keyed("steps", 200, 10))
    steps.run_until_idle(subscribe(Mode.CONCURRENT), harness)
    with pytest.raises(AssertionError):
        harness.assert_order(10, 20)


@pytest.mark.parametrize("mode", ORDERED)
def test_failure_suspends_and_order_still_holds(steps: ConsumptionBench, mode: Mode) -> None:
    """Every seventh message fails twice before it succeeds."""
    harness = OrderHarness(
        lambda delivery: (
            ValueError(f"{delivery.key} again") if delivery.body["n"] == 3 and delivery.attempt < 3 else None
        )
    )
    steps.publish(keyed("steps", 300, 50))
    with steps.running((subscribe(mode), harness)):
        eventually(lambda: harness.total == 300)
    harness.assert_order(50, 6)
    assert {harness.attempts[f"k{key}", 3] for key in range(50)} == {3}
    assert steps.retrying() == 0
    steps.assert_conserved("g")


def test_failing_message_holds_up_its_queue_in_orderly_mode(steps: ConsumptionBench) -> None:
    steps.declare("single", queues=1)
    poison = threading.Event()
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        if delivery.key == "k1" and not poison.is_set():
            raise ValueError("still down")
        seen.append(delivery.key)

    steps.publish([Message(topic="single", key=f"k{n}", body=b"{}") for n in range(4)])
    with steps.running((subscribe(topic="single"), handle)):
        (queue,) = eventually(lambda: [q for q in progress.list_queues(steps.run, "g") if q.blocked_by is not None])
        # A blocked queue is named: queue, message, error, since when.
        assert (queue.topic, queue.number, queue.lag) == ("single", 0, 3)
        assert queue.blocked_error is not None and queue.blocked_error.startswith("ValueError: still down")
        assert queue.blocked_since is not None
        assert seen == ["k0"]
        poison.set()
        eventually(lambda: seen == ["k0", "k1", "k2", "k3"])


@pytest.mark.parametrize("batch", [1, 50])
def test_key_ordered_with_one_poisoned_key_all_others_finish(steps: ConsumptionBench, batch: int) -> None:
    healed = threading.Event()
    harness = OrderHarness(
        lambda delivery: ValueError("poison") if delivery.key == "k7" and not healed.is_set() else None
    )
    steps.publish(keyed("steps", 5_000, 100))
    with steps.running((subscribe(Mode.KEY_ORDERED, batch=batch), harness)):
        others = [f"k{n}" for n in range(100) if n != 7]
        eventually(lambda: all(len(set(harness.handled[key])) == 50 for key in others))
        assert harness.handled["k7"] == []
        healed.set()
        eventually(lambda: len(harness.handled["k7"]) == 50)
        eventually(lambda: steps.lag("g") == 0)
    assert harness.overlaps == 0
    assert harness.handled["k7"] == list(range(50))
    for key in others:
        assert list(dict.fromkeys(harness.handled[key])) == list(range(50))
    steps.assert_conserved("g")


KEYS = ((0, "bad"), (1, "good"))


def test_a_blocked_key_keeps_no_bodies_in_memory() -> None:
    """Only the offsets of its later messages are kept, so the queue is fetched far beyond the buffered messages."""
    group = ConsumingGroup(1, "g", broadcast=False)
    subscribed = group.subscribe(subscribe(Mode.KEY_ORDERED), lambda _: None, 1)
    queue = OwnedQueue(Lease((1, 1), 1, 0.0, UUID(int=0)), group, subscribed, "steps/0", Position(0, 0))
    lane = OrderedLane(1, by_key=True)
    bad, good = (
        [FetchedEntry(queue, 10 * n + m, 0, key, ()) for n in range(3)] for m, key in enumerate(("bad", "good"))
    )
    queue.buffered = 6
    lane.offer([*bad, *good])
    assert lane.take(0.0) == bad[:1]
    bad[0].due = 60.0
    lane.end(bad[:1], bad[:1])
    lane.offer(later := [FetchedEntry(queue, 100, 0, "bad", ())])
    assert [item.row for item in (*bad, *later, *good)] == [(), None, None, None, (), (), ()]
    assert queue.buffered == 3
    assert [lane.take(0.0), lane.take(0.0)] == [good[:1], []]
    assert lane.take(60.0) == bad[:1]


@pytest.mark.parametrize("mode", ORDERED)
def test_retry_later_goes_to_the_retry_topic_and_is_handled_later(steps: ConsumptionBench, mode: Mode) -> None:
    order: list[tuple[int, str]] = []
    healed = False

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 1 and not healed:
            raise TimeoutError
        order.append((delivery.body["n"], delivery.queue.split("/")[0]))

    subscription = subscribe(
        mode, on_error={TimeoutError: OnError.RETRY_LATER}, retry=RetryPolicy(delays_seconds=[0.0], max_attempts=5)
    )
    steps.publish([Message(topic="steps", key="k", body=encode({"n": n})) for n in range(4)])
    runtime = steps.runtime((subscription, handle))
    runtime.run_once()
    assert order == [(0, "steps"), (2, "steps"), (3, "steps")]
    steps.sequence()
    healed = True
    runtime.run_once()
    assert order[3:] == [(1, "%RETRY%g")]
    steps.assert_conserved("g")


@pytest.mark.parametrize("mode", ORDERED)
def test_poison_message_under_each_policy(steps: ConsumptionBench, mode: Mode) -> None:
    """Dead-lettered by its type, or after the suspensions it is allowed; the later ones of its key follow."""
    harness = OrderHarness(
        lambda d: {1: PermanentError("bad"), 2: ValueError("worse")}.get(d.body["n"]) if d.key == "k" else None
    )
    steps.publish([Message(topic="steps", key="k", body=encode({"n": n})) for n in range(5)])
    with steps.running((subscribe(mode, max_suspends=2), harness)):
        eventually(lambda: harness.handled["k"] == [0, 3, 4])
    assert harness.attempts["k", 1] == 1
    assert harness.attempts["k", 2] == 3
    letters = dead_letters.list_dead_letters(Executor(steps.connection, "outbox"), "g")
    assert sorted((letter.error.split(":")[0], letter.attempts) for letter in letters) == [
        ("PermanentError", 1),
        ("ValueError", 3),
    ]
    steps.assert_conserved("g")


def test_listener_chooses_the_pause_in_place(steps: ConsumptionBench) -> None:
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt == 1:
            raise RetryLater(level=2)

    policy = RetryPolicy(delays_seconds=[60, 0.05])
    steps.publish([Message(topic="steps", key="k", body=b"{}")])
    with steps.running((subscribe(suspend_seconds=60, retry=policy), handle)):
        eventually(lambda: attempts == [1, 2])


def test_slow_messages_keep_their_key_waiting_only(steps: ConsumptionBench) -> None:
    slow = threading.Event()

    def wait_if_slow(delivery: Delivery) -> Exception | None:
        return TimeoutError() if delivery.key == "k0" and not slow.wait(20) else None

    harness = OrderHarness(wait_if_slow)
    steps.publish(keyed("steps", 400, 20))
    with steps.running((subscribe(Mode.KEY_ORDERED), harness)):
        eventually(lambda: harness.total == 380)
        slow.set()
        eventually(lambda: harness.total == 400)
    harness.assert_order(20, 20)


@pytest.mark.parametrize("mode", ORDERED)
def test_order_with_tags(steps: ConsumptionBench, mode: Mode) -> None:
    """Filtered-out messages leave no hole that others wait behind."""
    harness = OrderHarness()
    messages = []
    for n in range(200):
        messages += [
            Message(topic="steps", key=f"k{n % 10}", tag=tag, body=encode({"n": n // 10 if tag == "paid" else -1}))
            for tag in ("paid", "noise")
        ]
    steps.publish(messages)
    steps.run_until_idle(subscribe(mode, filter="paid"), harness)
    harness.assert_order(10, 20)
    filtered, handled = steps.rows("SELECT sum(filtered), sum(handled) FROM outbox.offset_v1")[0]
    assert (filtered, handled) == (200, 200)
    steps.assert_conserved("g")


@pytest.mark.parametrize("mode", ORDERED)
def test_order_in_broadcast_groups(steps: ConsumptionBench, mode: Mode) -> None:
    first, second = OrderHarness(), OrderHarness()
    steps.publish(keyed("steps", 500, 50))
    subscription = subscribe(mode, broadcast=True)
    with steps.running((subscription, first)), steps.running((subscription, second)):
        eventually(lambda: first.total == second.total == 500)
    first.assert_order(50, 10)
    second.assert_order(50, 10)
