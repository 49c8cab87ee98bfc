"""The running handler calls: started, finished, timed out, and given up while their threads still run.

See decision 068.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outbox.broker.dispatch.owned_queue import OwnedQueue, Phase
from outbox.broker.dispatch.subscription_runner import SubscriptionRunner
from outbox.broker.dispatch.work import NOT_STARTED, FetchedEntry, HandlerCall, Result
from outbox.broker.dispatch.worker_pool import STUCK_LIMIT
from outbox.errors import HandlerTimedOut
from outbox.ports import Disposition

# The thread collects results that no other work waits for within this time (seconds).
COLLECT_SECONDS: Final = 0.05


class Calls:
    """Part of the dispatching thread, except `finished`. `runners` by (group id, topic id)."""

    def __init__(self, runners: Mapping[tuple[int, int], SubscriptionRunner]) -> None:
        self._runners = runners
        self._running: set[HandlerCall] = set()
        self._stuck: dict[HandlerCall, list[FetchedEntry]] = {}
        self._finished: deque[HandlerCall] = deque()
        # The time until which the dispatching thread sleeps unless woken, and the time at which it looks for results.
        self._asleep_until = 0.0
        self._collect_at = 0.0
        # Whether the dispatching thread wants to be woken for each finished call; it sets this itself.
        self.watched = False

    def finished(self, work: HandlerCall) -> bool:
        """Record a finished call; returns whether to wake the dispatching thread. The handlers' threads call this.

        If there is enough other work, a successful call only moves the offset. The dispatching thread collects it the
        next time it is awake, if that is soon: waking it for each call costs more than handling does.
        """
        self._finished.append(work)
        # Check the sleep time after appending (see `sleep`): a thread that is already asleep has missed the append.
        return self._asleep_until - time.monotonic() > COLLECT_SECONDS or self._is_awaited(work)

    def sleep(self, seconds: float) -> float:
        """Return how long, of `seconds`, the dispatching thread may sleep; call it right before the sleep."""
        now = time.monotonic()
        looks = self._collect_at > now
        if looks:
            seconds = min(seconds, self._collect_at - now)
        self._asleep_until = now + seconds
        # Check for finished calls after setting the sleep time: a call that finishes later sees that time.
        return 0.0 if self._finished and not (looks and not self.watched) else seconds

    def _is_awaited(self, work: HandlerCall) -> bool:
        """Whether other work waits for this result:

        its key or queue, its attempt, the threads, or the dispatching thread.
        """
        if self.watched or work.abandoned or work.subscribed.ordered or len(work.items) > 1:
            return True
        return not isinstance(work.results[0], Disposition) or self._runners[work.subscribed.key].is_running_out

    @property
    def any_running(self) -> bool:
        """Whether a handler runs whose result still counts."""
        return bool(self._running)

    @property
    def any_counting(self) -> bool:
        """Whether a handler runs whose result still counts, or a finished call is not booked yet."""
        return bool(self._running or self._finished)

    def deadlines(self) -> list[float]:
        """Return when running calls reach their timeout, and when stuck calls hang for too long (time.monotonic)."""
        now = time.monotonic()
        limits = [(work.started_at, work.subscribed.subscription.timeout_seconds) for work in self._running]
        hangs = [(work.started_at, 2 * work.subscribed.subscription.timeout_seconds) for work in self._stuck]
        # After that time the process ends, so the thread need not wait for it.
        return [began + seconds for began, seconds in limits if began is not None] + [
            began + seconds for began, seconds in hangs if began is not None and began + seconds > now
        ]

    def end_of_started(self, queue: OwnedQueue) -> int:
        """Return the offset after the highest one of this queue that is in a running call, 0 without one."""
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
        self._runners[work.subscribed.key].pool.submit(work)

    def hold(self, work: HandlerCall) -> None:
        """Count the call as running, but call its handler only on `start`, or end it with `refuse`."""
        for item in work.items:
            item.queue.started()
        self._running.add(work)
        self._runners[work.subscribed.key].pool.reserve()

    def start(self, work: HandlerCall) -> None:
        """Call the handler of a held call."""
        self._runners[work.subscribed.key].pool.start(work)

    def refuse(self, work: HandlerCall, result: Result) -> None:
        """End a call before its handler was called."""
        work.results = [result] * len(work.items)
        self._finished.append(work)

    def runs_beside(self, work: HandlerCall) -> bool:
        """Whether another handler runs whose result still counts."""
        return len(self._running) > 1 or (bool(self._running) and work not in self._running)

    def take_back(self) -> None:
        """Take back the calls that wait for hanging threads that cannot be replaced: they were not started."""
        for runner in self._runners.values():
            if runner.pool.frozen:
                for work in runner.pool.withdraw():
                    self.refuse(work, NOT_STARTED)

    def hung(self) -> str:
        """Return why this process cannot continue with its messages; '' if it can.

        Either a pool has no threads left that could be replaced. Or a key or queue has waited for a given-up call for
        as long again as the call was allowed to run.
        """
        for runner in self._runners.values():
            if runner.pool.frozen:
                limit = STUCK_LIMIT * runner.subscribed.subscription.threads
                return f"more than {limit} handlers of group {runner.subscribed.group.name!r} hang"
        now = time.monotonic()
        for work in self._stuck:
            seconds = 2 * work.subscribed.subscription.timeout_seconds
            if work.started_at is not None and now - work.started_at >= seconds:
                return (
                    f"a handler of group {work.subscribed.group.name!r} has blocked its queue or key for {seconds:g} s"
                )
        return ""

    def over(self) -> Iterator[tuple[HandlerCall, Sequence[Result]]]:
        """Return the calls to be booked with their results: the finished ones, then those that ran too long."""
        while self._finished:
            work = self._finished.popleft()
            if work.abandoned:
                self._returned_late(work)
                continue
            self._running.discard(work)
            self._runners[work.subscribed.key].pool.collected()
            yield work, work.results
        for work in self._overdue():
            self._running.discard(work)
            self._runners[work.subscribed.key].pool.replace_stuck()
            error = HandlerTimedOut(f"{work.abandoned}; the attempt counts as failed and its late result is ignored.")
            yield work, [error] * len(work.items)

    def keep_until_returned(self, work: HandlerCall, back: list[FetchedEntry]) -> None:
        """In ordered modes, delay the next attempt at these messages until the stuck call has returned."""
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
        """Record that a given-up call has returned: its result does not count, but its key or queue may continue."""
        self._runners[work.subscribed.key].pool.unstuck()
        back = self._stuck.pop(work, None)
        if back is not None:
            back = [item for item in back if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)]
            work.lane.settle(work.items, back)
