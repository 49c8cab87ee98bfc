"""When the dispatching thread is woken for a call that is over: where something waits for it, and never too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from uuid import UUID

import pytest

from outbox.broker.consumer.call import HandlerCall
from outbox.broker.consumer.lanes import FetchedEntry
from outbox.broker.consumer.owned_queue import ConsumingGroup, OwnedQueue
from outbox.broker.consumer.scheduler import Calls, Scheduler
from outbox.broker.consumer.subscription_runner import SubscriptionRunner
from outbox.broker.groups.leases import Lease, lease_clock
from outbox.broker.groups.offsets import Position
from outbox.broker.groups.redelivery import Redelivery
from outbox.message import Delivery
from outbox.ports import Disposition
from outbox.subscription import Effects, Mode, Subscription

# Seconds; so many that no slow machine comes near them.
SOON, LONG = 100.0, 1000.0


class Line:
    """One runner, whose handlers return when the test allows it."""

    def __init__(self, mode: Mode = Mode.CONCURRENT, effects: Effects = Effects.INSIDE) -> None:
        subscription = Subscription(group="g", topic="t", mode=mode, effects=effects, threads=2)
        self.group = ConsumingGroup(1, "g", broadcast=False)
        self.subscribed = self.group.subscribe(subscription, _nothing, 1)
        self.queue = OwnedQueue(
            Lease((1, 1), 1, lease_clock() + 60, UUID(int=0)), self.group, self.subscribed, "t/0", Position(0, 0)
        )
        self.over = threading.Event()
        self.scheduler = Scheduler([subscription], self._run)
        self.runner = SubscriptionRunner(self.subscribed, self.scheduler.lock)
        self.calls = Calls({self.subscribed.key: self.runner}, self.scheduler)

    def _run(self, *_: object) -> None:
        self.over.wait(60)

    def submitted(self) -> HandlerCall:
        work = HandlerCall(self.subscribed, self.runner.lane, [FetchedEntry(self.queue, 0, 0, "", ())])
        self.calls.submit(work)
        return work


def _nothing(_: Delivery) -> None:
    pass


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr("outbox.broker.consumer.scheduler.COLLECT_SECONDS", SOON)
    line = Line()
    yield line
    line.over.set()
    line.scheduler.stop(within_seconds=10)


def handled(work: HandlerCall) -> HandlerCall:
    work.results = [Disposition.HANDLED]
    return work


def test_a_handled_message_is_collected_when_the_dispatching_thread_wakes_by_itself(line: Line) -> None:
    work = line.submitted()
    assert line.calls.sleep(LONG) <= SOON
    assert not line.calls.finished(handled(work))


def test_a_thread_that_sleeps_longer_is_woken(line: Line) -> None:
    work = line.submitted()
    # No thread has collected the results when their time came.
    line.calls._collect_at = 0.0
    assert line.calls.sleep(LONG) == LONG
    assert line.calls.finished(handled(work))


def test_what_is_over_before_the_sleep_begins_is_not_slept_over(line: Line) -> None:
    work = line.submitted()
    assert not line.calls.finished(handled(work))
    assert line.calls.sleep(LONG) <= SOON
    line.calls._collect_at = 0.0
    assert line.calls.sleep(LONG) == 0.0


def test_a_failure_wakes_at_once(line: Line) -> None:
    work = line.submitted()
    line.calls.sleep(LONG)
    work.results = [ValueError("no")]
    assert line.calls.finished(work)


def test_threads_that_have_nothing_to_do_soon_wake_at_once_if_messages_wait(line: Line) -> None:
    works = [line.submitted() for _ in range(8)]
    line.calls.sleep(LONG)
    line.runner.backlog = True
    assert len(line.runner.calls.waiting) > 2
    assert not line.calls.finished(handled(works[0]))
    line.scheduler.withdraw(line.runner.calls)
    assert line.calls.finished(handled(works[1]))


def test_a_call_that_is_watched_wakes_at_once(line: Line) -> None:
    work = line.submitted()
    line.calls.watched = True
    line.calls.sleep(LONG)
    assert line.calls.finished(handled(work))
    assert line.calls.sleep(LONG) == 0.0


def test_an_ordered_queue_continues_at_once() -> None:
    line = Line(Mode.ORDERLY)
    work = line.submitted()
    line.calls.sleep(LONG)
    assert line.calls.finished(handled(work))
    line.over.set()
    line.scheduler.stop(within_seconds=10)


def test_a_redelivery_of_an_earlier_life_is_not_waited_for() -> None:
    """Its time would never be moved, and the dispatching thread would not sleep until the handler returns."""
    line = Line(effects=Effects.OUTSIDE)
    work = HandlerCall(line.subscribed, line.runner.lane, [])
    line.calls.hold(work)
    work.claimed(10.0)
    work.redelivery, work.renew_at, work.has_left = Redelivery(1, 1, 0), 1.0, True
    assert line.calls.deadlines() == [1.0]
    line.calls.forget_redeliveries()
    assert line.calls.deadlines() == []
