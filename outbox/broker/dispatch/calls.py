"""The handler calls that run: started, over, over time, and given up while their threads still run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outbox.broker.dispatch.owned_queue import OwnedQueue, Phase
from outbox.broker.dispatch.station import SubscriptionRunner
from outbox.broker.dispatch.work import NOT_STARTED, FetchedEntry, HandlerCall, Result
from outbox.broker.dispatch.worker_pool import STUCK_LIMIT
from outbox.errors import HandlerTimedOut
from outbox.ports import Disposition

# Results that nothing waits for are collected within this time.
COLLECT_SECONDS: Final = 0.05


class Calls:
    """Part of the dispatching thread, but for `finished`. `stations` by (group id, topic id)."""

    def __init__(self, stations: Mapping[tuple[int, int], SubscriptionRunner]) -> None:
        self._stations = stations
        self._running: set[HandlerCall] = set()
        self._stuck: dict[HandlerCall, list[FetchedEntry]] = {}
        self._finished: deque[HandlerCall] = deque()
        # Until when the dispatching thread sleeps if nobody wakes it, and when it looks for results by itself.
        self._asleep_until = 0.0
        self._collect_at = 0.0
        # Whether the dispatching thread wants to know at once of each call that is over; it says so itself.
        self.watched = False

    def finished(self, work: HandlerCall) -> bool:
        """A call is over; returns whether the dispatching thread is to be woken. The handlers' threads call this.

        A message that was handled while there is enough to do only moves the offset. It is collected when that thread
        is awake next, if that is soon: waking it for each costs more than handling does.
        """
        self._finished.append(work)
        # Read after that (see `sleep`): whoever sleeps for longer than it is to take has not seen it.
        return self._asleep_until - time.monotonic() > COLLECT_SECONDS or self._is_awaited(work)

    def sleep(self, seconds: float) -> float:
        """For how long of `seconds` the dispatching thread may sleep; to be asked right before it does."""
        now = time.monotonic()
        looks = self._collect_at > now
        if looks:
            seconds = min(seconds, self._collect_at - now)
        self._asleep_until = now + seconds
        # Looked at after that: who finishes a call from here on sees for how long this thread sleeps.
        return 0.0 if self._finished and not (looks and not self.watched) else seconds

    def _is_awaited(self, work: HandlerCall) -> bool:
        """Whether something goes on only with this result: its line, its attempt, the threads, whoever watches."""
        if self.watched or work.abandoned or work.subscribed.ordered or len(work.items) > 1:
            return True
        return not isinstance(work.results[0], Disposition) or self._stations[work.subscribed.key].is_running_out

    @property
    def any_running(self) -> bool:
        """Whether a handler runs that still counts."""
        return bool(self._running)

    @property
    def any_counting(self) -> bool:
        """Whether a handler runs that still counts, or a call is over and not booked."""
        return bool(self._running or self._finished)

    def deadlines(self) -> list[float]:
        """When calls that run now will have run too long, or will hang for too long (time.monotonic)."""
        now = time.monotonic()
        limits = [(work.started_at, work.subscribed.subscription.timeout_seconds) for work in self._running]
        hangs = [(work.started_at, 2 * work.subscribed.subscription.timeout_seconds) for work in self._stuck]
        # Once that is over the process ends: nothing comes after it to wait for.
        return [began + seconds for began, seconds in limits if began is not None] + [
            began + seconds for began, seconds in hangs if began is not None and began + seconds > now
        ]

    def end_of_started(self, queue: OwnedQueue) -> int:
        """The offset after the highest one of this queue that is in a running call, 0 without one."""
        started = [item.offset for work in self._running for item in work.items if item.queue is queue]
        return max(started, default=-1) + 1

    def submit(self, work: HandlerCall) -> None:
        """Call the handler as soon as a thread is free."""
        for item in work.items:
            item.queue.started()
        self._running.add(work)
        now = time.monotonic()
        if self._collect_at < now:
            self._collect_at = now + COLLECT_SECONDS
        self._stations[work.subscribed.key].pool.submit(work)

    def hold(self, work: HandlerCall) -> None:
        """Count it as running, but call its handler only when it is `start`ed, or `refuse` that."""
        for item in work.items:
            item.queue.started()
        self._running.add(work)
        self._stations[work.subscribed.key].pool.reserve()

    def start(self, work: HandlerCall) -> None:
        """Call the handler of a work that was held."""
        self._stations[work.subscribed.key].pool.start(work)

    def refuse(self, work: HandlerCall, result: Result) -> None:
        """A work is over before its handler was called."""
        work.results = [result] * len(work.items)
        self._finished.append(work)

    def runs_beside(self, work: HandlerCall) -> bool:
        """Whether another handler runs that still counts."""
        return len(self._running) > 1 or (bool(self._running) and work not in self._running)

    def take_back(self) -> None:
        """What waits for threads that hang, and that no others can replace, was not started."""
        for station in self._stations.values():
            if station.pool.frozen:
                for work in station.pool.withdraw():
                    self.refuse(work, NOT_STARTED)

    def hung(self) -> str:
        """Why this process cannot go on with what it consumes; '' if it can.

        A pool has no threads left that could be replaced; or a line has waited for a call that was given up for as long
        again as it was allowed to run.
        """
        for station in self._stations.values():
            if station.pool.frozen:
                limit = STUCK_LIMIT * station.subscribed.subscription.threads
                return f"more than {limit} handlers of group {station.subscribed.group.name!r} hang"
        now = time.monotonic()
        for work in self._stuck:
            seconds = 2 * work.subscribed.subscription.timeout_seconds
            if work.started_at is not None and now - work.started_at >= seconds:
                return f"a handler of group {work.subscribed.group.name!r} has held up its line for {seconds:g} s"
        return ""

    def over(self) -> Iterator[tuple[HandlerCall, Sequence[Result]]]:
        """Calls to be booked with their results: those that are over, then those that ran too long."""
        while self._finished:
            work = self._finished.popleft()
            if work.abandoned:
                self._returned_late(work)
                continue
            self._running.discard(work)
            self._stations[work.subscribed.key].pool.collected()
            yield work, work.results
        for work in self._overdue():
            self._running.discard(work)
            self._stations[work.subscribed.key].pool.replace_stuck()
            error = HandlerTimedOut(f"{work.abandoned}; the attempt counts as failed and its late result is ignored.")
            yield work, [error] * len(work.items)

    def keep_until_returned(self, work: HandlerCall, back: list[FetchedEntry]) -> None:
        """One at a time: the next attempt at these waits until the stuck call has returned."""
        self._stuck[work] = back

    def _overdue(self) -> list[HandlerCall]:
        now = time.monotonic()
        overdue: list[HandlerCall] = []
        for work in self._running:
            limit = work.subscribed.subscription.timeout_seconds
            if work.started_at is not None and now - work.started_at >= limit and not work.results:
                work.abandoned = f"the handler of group {work.subscribed.group.name!r} ran longer than {limit:g} s"
                overdue.append(work)
        return overdue

    def _returned_late(self, work: HandlerCall) -> None:
        """A call that was given up has returned: its result does not count, but its line may go on."""
        self._stations[work.subscribed.key].pool.unstuck()
        back = self._stuck.pop(work, None)
        if back is not None:
            back = [item for item in back if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)]
            work.lane.settle(work.items, back)
