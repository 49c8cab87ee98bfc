"""The handler threads of a process: which waiting call each takes, and when they start and end."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox.broker.consumer.scheduler import Scheduler
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.subscription import Subscription, threads_of
from tests.support import eventually


def subscriptions(*threads: int) -> list[Subscription]:
    return [Subscription(topic=f"t{number}", group="g", threads=each) for number, each in enumerate(threads)]


class Call:
    """As much of a call as the scheduler looks at. It runs until `release`, or for `seconds`."""

    def __init__(self, place: int, number: int, seconds: float | None) -> None:
        self.place, self.number, self.seconds, self.is_given_up = place, number, seconds, False
        self.has_begun, self.release = threading.Event(), threading.Event()


class Process:
    """Subscriptions with `threads` threads each, which share `most`, and which calls ran."""

    def __init__(self, *threads: int, most: int) -> None:
        known = subscriptions(*threads)
        self.threads = Scheduler(known, self._run, most)
        self.pools = [SubscriptionCalls(one.topic, one.threads, self.threads.lock) for one in known]
        self.calls: list[Call] = []
        self.ran: list[Call] = []
        self.in_threads: set[int] = set()
        self.most: Counter[int] = Counter()
        self._running: Counter[int] = Counter()
        self._lock = threading.Lock()

    def _run(self, call: Any, *_: object) -> None:
        self.in_threads.add(threading.get_ident())
        with self._lock:
            self.ran.append(call)
            self._running[call.place] += 1
            self.most[call.place] = max(self.most[call.place], self._running[call.place])
        call.has_begun.set()
        if call.seconds is None:
            assert call.release.wait(20)
        else:
            time.sleep(call.seconds)
        with self._lock:
            self._running[call.place] -= 1

    def submit(self, place: int, seconds: float | None = None) -> Call:
        call = Call(place, len(self.calls), seconds)
        self.calls.append(call)
        self.threads.submit(self.pools[place], call)  # type: ignore[arg-type]
        return call

    def allow(self, place: int, number: int | None) -> int:
        running = self.pools[place].allow(number)
        self.threads.spread(self.pools[place])
        return running

    @property
    def running(self) -> dict[int, int]:
        """How many calls of each subscription run."""
        with self._lock:
            return {place: count for place, count in self._running.items() if count}

    @property
    def began(self) -> list[int]:
        """The calls that have begun, by their numbers."""
        return [call.number for call in self.ran]


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(*threads: int, most: int) -> Process:
        made.append(Process(*threads, most=most))
        return made[-1]

    yield make
    for one in made:
        for call in one.calls:
            call.release.set()
        one.threads.stop(within_seconds=10)
    assert not [one for one in threading.enumerate() if one.name.startswith(("t0-", "t1-", "t2-"))]


def test_fourteen_busy_subscriptions_share_eight_threads_in_turn(process: Callable[..., Process]) -> None:
    one = process(*[8] * 14, most=8)
    first = [one.submit(place) for _ in range(4) for place in range(14)]
    eventually(lambda: one.running == dict.fromkeys(range(8), 1))
    for call in first:
        call.release.set()
    eventually(lambda: len(one.ran) == 56)
    assert Counter(call.place for call in one.ran) == dict.fromkeys(range(14), 4)
    assert len(one.in_threads) == 8
    # No subscription got its last call before each other one had its first.
    assert {call.place for call in one.ran[:14]} == set(range(14))


def test_slow_handlers_of_one_subscription_leave_threads_for_the_others(process: Callable[..., Process]) -> None:
    one = process(8, 8, 8, most=8)
    slow = [one.submit(0) for _ in range(20)]
    eventually(lambda: one.running == {0: 6})
    for _ in range(50):
        assert one.submit(1, 0.0).has_begun.wait(10)
        assert one.submit(2, 0.0).has_begun.wait(10)
    eventually(lambda: one.running == {0: 6})
    for call in slow:
        call.release.set()
    eventually(lambda: Counter(call.place for call in one.ran) == {0: 20, 1: 50, 2: 50})


def test_a_thread_whose_handler_hangs_is_replaced(process: Callable[..., Process]) -> None:
    one = process(1, 1, most=1)
    hanging = one.submit(0)
    assert hanging.has_begun.wait(10)
    waiting = one.submit(1, 0.0)
    assert not waiting.has_begun.wait(0.1)
    hanging.is_given_up = True
    one.threads.replace(one.pools[0])
    assert waiting.has_begun.wait(10)
    hanging.release.set()
    one.threads.unstuck(one.pools[0])
    assert one.submit(0, 0.0).has_begun.wait(10)
    eventually(lambda: sum(thread.name.startswith(("t0-", "t1-")) for thread in threading.enumerate()) == 1)


def test_how_many_threads_a_process_has() -> None:
    for threads, most, expected in (
        ([8] * 14, 8, 8),
        ([1, 2], 8, 3),
        ([8, 20], 8, 20),
        ([8, 8], 4, 4),
        ([2] * 14, 8, 8),
    ):
        assert threads_of(subscriptions(*threads), most) == expected, (threads, most)


def test_after_a_burst_one_thread_gets_every_call_and_the_others_end(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", 0.5)
    one = process(8, most=8)
    burst = [one.submit(0) for _ in range(5)]
    eventually(lambda: one.running == {0: 5})
    for call in burst:
        call.release.set()
    eventually(lambda: len(one.threads._idle) == 5)
    one.in_threads.clear()

    def others_have_ended() -> bool:
        assert one.submit(0, 0.0).has_begun.wait(10)
        eventually(lambda: one.threads._busy == 0)
        return one.threads._alive == 1

    eventually(others_have_ended)
    assert len(one.in_threads) == 1


def test_an_admission_lets_calls_start_and_keeps_others(process: Callable[..., Process]) -> None:
    one = process(4, most=4)
    [pool] = one.pools
    assert one.allow(0, 1) == 0
    calls = [one.submit(0) for _ in range(4)]
    eventually(lambda: one.began == [0])
    assert (pool.waiting_for_admission, pool.running, pool.is_closed) == (3, 1, False)
    one.allow(0, 2)
    eventually(lambda: one.began == [0, 1])
    # A call that has ended lets the next one start, and an abandoned one does not while its handler runs.
    calls[0].release.set()
    eventually(lambda: one.began == [0, 1, 2])
    calls[1].is_given_up = True
    one.threads.replace(pool)
    assert (pool.running, pool.waiting_for_admission) == (2, 1)
    calls[1].release.set()
    one.threads.unstuck(pool)
    eventually(lambda: one.began == [0, 1, 2, 3])
    assert one.allow(0, 0) == 2
    waiting: object = one.submit(0)
    assert pool.is_closed
    assert list[object](one.threads.withdraw(pool)) == [waiting]
    for call in calls:
        call.release.set()
    eventually(lambda: pool.running == 0)
    assert one.began == [0, 1, 2, 3]


@pytest.mark.parametrize("idle_seconds", [30.0, 0.0], ids=["threads wait", "threads end when they find nothing"])
def test_each_call_runs_once_whatever_changes_meanwhile(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch, idle_seconds: float
) -> None:
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", idle_seconds)
    one, chance = process(3, 2, 4, most=4), random.Random(7)
    for _ in range(1500):
        place = chance.randrange(3)
        one.submit(place, 0.0005)
        if chance.random() < 0.2:
            one.allow(place, chance.choice([0, 1, 2, None]))
        if chance.random() < 0.05:
            time.sleep(0.003)
    for place in range(3):
        one.allow(place, None)
    eventually(lambda: len(one.ran) == 1500)
    assert sorted(one.began) == list(range(1500))
    assert all(one.most[place] <= limit for place, limit in enumerate((3, 2, 4)))
    eventually(lambda: [(pool.serving, len(pool.waiting)) for pool in one.pools] == [(0, 0)] * 3)
    assert not one.threads._queue


def test_a_call_waits_for_a_thread_if_the_system_refuses_a_further_one(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = process(3, 3, most=4)
    held = one.submit(0)
    eventually(lambda: one.began == [0])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    later = [one.submit(place) for place in (0, 1)]
    assert one.began == [0]
    for number, call in enumerate((held, *later), start=1):
        call.release.set()
        eventually(lambda number=number: len(one.began) == min(number + 1, 3))  # type: ignore[misc]
    eventually(lambda: one.pools[0].running == one.pools[1].running == 0)
    assert sorted(one.began) == [0, 1, 2]
