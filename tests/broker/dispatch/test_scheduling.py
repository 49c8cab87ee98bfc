"""Which waiting call a handler thread takes: each call runs once, and within the limits of its subscription."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from outbox.broker.consumer.scheduler import Scheduler, SubscriptionCalls
from outbox.subscription import Subscription
from tests.support import eventually


class Call:
    """As much of a call as the pool looks at."""

    def __init__(self, pool: SubscriptionCalls, number: int) -> None:
        self.pool, self.number, self.is_given_up, self.release = pool, number, False, threading.Event()


class Process:
    """Subscriptions with `threads` threads each, which share `most`. Calls run until `release`, or for `seconds`."""

    def __init__(self, *threads: int, most: int, seconds: float | None = None) -> None:
        known = [Subscription(topic=f"t{n}", group="g", threads=each) for n, each in enumerate(threads)]
        self.threads, self._seconds = Scheduler(known, self._run, most), seconds
        self.pools = [SubscriptionCalls(one.topic, one.threads, self.threads.lock) for one in known]
        self.running: Counter[SubscriptionCalls] = Counter()
        self.most: Counter[SubscriptionCalls] = Counter()
        self.began: list[int] = []
        self._lock = threading.Lock()

    def _run(self, call: Any, *_: object) -> None:
        pool = call.pool
        with self._lock:
            self.began.append(call.number)
            self.running[pool] += 1
            self.most[pool] = max(self.most[pool], self.running[pool])
        if self._seconds is None:
            assert call.release.wait(20)
        else:
            time.sleep(self._seconds)
        with self._lock:
            self.running[pool] -= 1

    def allow(self, pool: SubscriptionCalls, number: int | None) -> int:
        running = pool.allow(number)
        self.threads.spread(pool)
        return running

    def submit(self, pool: SubscriptionCalls, number: int) -> Call:
        call = Call(pool, number)
        self.threads.submit(pool, call)  # type: ignore[arg-type]
        return call


def test_an_admission_lets_calls_start_and_keeps_others() -> None:
    process = Process(4, most=4)
    [pool] = process.pools
    assert process.allow(pool, 1) == 0
    calls = [process.submit(pool, number) for number in range(4)]
    eventually(lambda: process.began == [0])
    assert (pool.waiting_for_admission, pool.running, pool.is_closed) == (3, 1, False)
    process.allow(pool, 2)
    eventually(lambda: process.began == [0, 1])
    # A call that has ended lets the next one start, and an abandoned one does not while its handler runs.
    calls[0].release.set()
    eventually(lambda: process.began == [0, 1, 2])
    calls[1].is_given_up = True
    process.threads.replace(pool)
    assert (pool.running, pool.waiting_for_admission) == (2, 1)
    calls[1].release.set()
    process.threads.unstuck(pool)
    eventually(lambda: process.began == [0, 1, 2, 3])
    assert process.allow(pool, 0) == 2
    waiting: object = process.submit(pool, 4)
    assert pool.is_closed
    assert list[object](process.threads.withdraw(pool)) == [waiting]
    for call in calls:
        call.release.set()
    eventually(lambda: pool.running == 0)
    process.threads.stop(within_seconds=5)
    assert process.began == [0, 1, 2, 3]


def test_each_call_runs_once_whatever_changes_meanwhile() -> None:
    process, chance = Process(3, 2, 4, most=4, seconds=0.0005), random.Random(7)
    for number in range(1500):
        pool = chance.choice(process.pools)
        process.submit(pool, number)
        if chance.random() < 0.2:
            process.allow(pool, chance.choice([0, 1, 2, None]))
        if chance.random() < 0.05:
            time.sleep(0.003)
    for pool in process.pools:
        process.allow(pool, None)
    eventually(lambda: len(process.began) == 1500)
    assert sorted(process.began) == list(range(1500))
    assert all(process.most[pool] <= limit for pool, limit in zip(process.pools, (3, 2, 4), strict=True))
    eventually(lambda: [(pool.serving, len(pool.waiting)) for pool in process.pools] == [(0, 0)] * 3)
    assert not process.threads._queue
    process.threads.stop(within_seconds=5)


def test_a_call_waits_for_a_thread_if_the_system_refuses_a_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(3, 3, most=4)
    first, second = process.pools
    held = process.submit(first, 0)
    eventually(lambda: process.began == [0])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    later = [process.submit(pool, number) for number, pool in enumerate((first, second), start=1)]
    assert process.began == [0]
    for number, call in enumerate((held, *later), start=1):
        call.release.set()
        eventually(lambda number=number: len(process.began) == min(number + 1, 3))  # type: ignore[misc]
    eventually(lambda: first.running == second.running == 0)
    assert sorted(process.began) == [0, 1, 2]
    monkeypatch.undo()
    process.threads.stop(within_seconds=5)
