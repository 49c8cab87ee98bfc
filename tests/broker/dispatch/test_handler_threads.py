"""The handler threads of a process: all its subscriptions share them in turn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from outbox.broker.consumer.scheduler import Scheduler, SubscriptionCalls
from outbox.subscription import Subscription, threads_of
from tests.support import eventually


def subscriptions(*threads: int) -> list[Subscription]:
    return [Subscription(topic=f"t{number}", group="g", threads=each) for number, each in enumerate(threads)]


class Call:
    """As much of a call as the scheduler looks at. It runs until `release`."""

    def __init__(self, name: str, *, is_quick: bool = False) -> None:
        self.name, self.is_given_up = name, False
        self.has_begun, self.release = threading.Event(), threading.Event()
        if is_quick:
            self.release.set()


class Process:
    """The subscriptions of a process, and which calls ran."""

    def __init__(self, known: Sequence[Subscription], most: int | None) -> None:
        self.threads = Scheduler(known, self._run, most)
        self.pools = [SubscriptionCalls(one.topic, one.threads, self.threads.lock) for one in known]
        self.calls: list[Call] = []
        self.ran: list[str] = []
        self.in_threads: dict[int, set[str]] = {}

    def _run(self, call: Any, *_: object) -> None:
        self.in_threads.setdefault(threading.get_ident(), set()).add(call.name)
        self.ran.append(call.name)
        call.has_begun.set()
        assert call.release.wait(20)

    def submit(self, place: int, *, is_quick: bool = False) -> Call:
        call = Call(f"t{place}", is_quick=is_quick)
        self.calls.append(call)
        self.threads.submit(self.pools[place], call)  # type: ignore[arg-type]
        return call

    @property
    def running(self) -> Counter[str]:
        return Counter(call.name for call in self.calls if call.has_begun.is_set() and not call.release.is_set())


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for process in made:
        for call in process.calls:
            call.release.set()
        process.threads.stop(within_seconds=10)
        assert not [one for one in threading.enumerate() if one.name.startswith(("t0-", "t1-", "t2-"))]


def test_fourteen_busy_subscriptions_have_eight_threads_which_go_on_with_their_connections(
    processes: list[Process],
) -> None:
    process = Process(subscriptions(*[8] * 14), 8)
    processes.append(process)
    first = [process.submit(place) for _ in range(4) for place in range(14)]
    eventually(lambda: process.running.total() == 8)
    assert process.running == Counter(f"t{place}" for place in range(8))
    for call in first:
        call.release.set()
    eventually(lambda: len(process.ran) == 56)
    assert Counter(process.ran) == Counter({f"t{place}": 4 for place in range(14)})
    assert len(process.in_threads) == 8
    # In turn: no subscription got its last call before each other one had its first.
    assert set(process.ran[:14]) == {f"t{place}" for place in range(14)}


def test_slow_handlers_of_one_subscription_leave_threads_for_the_others(processes: list[Process]) -> None:
    process = Process(subscriptions(8, 8, 8), 8)
    processes.append(process)
    slow = [process.submit(0) for _ in range(20)]
    eventually(lambda: process.running == Counter(t0=6))
    for _ in range(50):
        assert process.submit(1, is_quick=True).has_begun.wait(10)
        assert process.submit(2, is_quick=True).has_begun.wait(10)
    assert process.running == Counter(t0=6)
    for call in slow:
        call.release.set()
    eventually(lambda: Counter(process.ran) == Counter(t0=20, t1=50, t2=50))


def test_a_thread_whose_handler_hangs_is_replaced(processes: list[Process]) -> None:
    process = Process(subscriptions(1, 1), 1)
    processes.append(process)
    hanging = process.submit(0)
    assert hanging.has_begun.wait(10)
    waiting = process.submit(1, is_quick=True)
    assert not waiting.has_begun.wait(0.1)
    hanging.is_given_up = True
    process.threads.replace(process.pools[0])
    assert waiting.has_begun.wait(10)
    hanging.release.set()
    process.threads.unstuck(process.pools[0])
    assert process.submit(0, is_quick=True).has_begun.wait(10)
    eventually(lambda: sum(one.name.startswith(("t0-", "t1-")) for one in threading.enumerate()) == 1)


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
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", 0.5)
    process = Process(subscriptions(8), 8)
    processes.append(process)
    burst = [process.submit(0) for _ in range(5)]
    eventually(lambda: process.running == Counter(t0=5))
    for call in burst:
        call.release.set()
    eventually(lambda: len(process.threads._idle) == 5)
    process.in_threads.clear()

    def others_have_ended() -> bool:
        assert process.submit(0, is_quick=True).has_begun.wait(10)
        eventually(lambda: process.threads._busy == 0)
        return process.threads._alive == 1

    eventually(others_have_ended)
    assert len(process.in_threads) == 1
