"""The threads of a pool: they come when there is work, and go when there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from outbox.broker.consumer.scheduler import Scheduler, SubscriptionCalls
from outbox.subscription import Subscription
from tests.support import eventually


class Call:
    """As much of a call as the scheduler looks at."""

    is_given_up = False


class Pool:
    """A pool, the calls that its threads ran, and the live threads."""

    def __init__(self, threads: int) -> None:
        self.ran: list[threading.Thread] = []
        self.threads = Scheduler([Subscription(topic="t", group="g", threads=threads)], self._run)
        self.pool = SubscriptionCalls("idle-test", threads, self.threads.lock)

    def _run(self, call: Any, *_: object) -> None:
        self.ran.append(threading.current_thread())

    def submit(self) -> None:
        self.threads.submit(self.pool, Call())  # type: ignore[arg-type]

    @staticmethod
    def alive() -> int:
        return sum(thread.name.startswith("idle-test") for thread in threading.enumerate())


@pytest.fixture
def four() -> Iterator[Pool]:
    """Four threads at most."""
    made = Pool(4)
    yield made
    made.threads.stop(within_seconds=5)
    assert made.alive() == 0


def test_threads_without_work_end_and_others_take_the_next(four: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", 0.05)
    for count in range(1, 4):
        four.submit()
        eventually(lambda count=count: len(four.ran) == count)  # type: ignore[misc]
        eventually(lambda: four.alive() == 0)
    assert len(set(four.ran)) == 3


@pytest.mark.slow
def test_no_work_is_left_behind_by_a_thread_that_ends(four: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread ends the moment it finds nothing, while works are put."""
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", 0.0)
    for count in range(1, 2001):
        four.submit()
        if count % 3 == 0:
            eventually(lambda count=count: len(four.ran) == count)  # type: ignore[misc]
    eventually(lambda: len(four.ran) == 2000)
