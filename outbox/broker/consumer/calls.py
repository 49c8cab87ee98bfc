"""The running handler calls: started, finished, timed out, and given up while their threads still run.

Each subscription has a runner: its lanes, its threads, and whether an outage makes it pause.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final
from uuid import UUID

from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.consumer.work import (
    NOT_STARTED,
    ConcurrentLane,
    FetchedEntry,
    HandlerCall,
    KeyOrderedLane,
    Lane,
    OrderlyLane,
    Result,
)
from outbox.broker.consumer.worker_pool import STUCK_LIMIT, WorkerPool
from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.errors import HandlerTimedOut
from outbox.ports import Disposition
from outbox.subscription import Mode, Subscription
from outbox.utils.backoff import Backoff

# -- outages ---------------------------------------------------------------------------------------
#
# See decision 067.
#
# Tell a poison message from a service that is down, by identical errors in a row on different messages.
#
# If a database or a service is down, every message fails, each after its own timeout, until the last one is a dead
# letter. So three failures with the same error, of calls without a common message and without a success in between,
# count as an **outage**. The subscription pauses. Its failed messages stay in place and use up no attempt. After the
# pause one call at a time tests whether the outage is over. The first success ends it.
#
# A few poison messages without other messages look the same. So an outage is assumed only as long as one message's own
# series of attempts would take. After that, attempts count again, so every message comes to an end.


_IN_A_ROW: Final = 3
_PAUSES: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)


class Outage:
    """The failures in a row of one subscription. Times are of time.monotonic; one thread uses it."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._error = ""
        # The messages of calls in a row that failed with this error; no two calls share a message.
        self._failed: list[frozenset[Hashable]] = []
        self._pauses = 0
        self._began = 0.0
        self._is_over_time = False
        # Whether the handler has set the length of the pause.
        self._asked = False
        self.resume_at: float | None = None

    @property
    def error(self) -> str:
        """The error of the outage; '' without one."""
        return self._error if self.resume_at is not None else ""

    @property
    def pauses(self) -> int:
        """The number of pauses in this outage; 0 without one."""
        return self._pauses if self.resume_at is not None else 0

    def admits(self, now: float, *, running: bool) -> bool:
        """Whether a call may be started: always, except in an outage; then one at a time, after the pause."""
        return self.resume_at is None or (now >= self.resume_at and not running)

    def succeeded(self, now: float = math.inf) -> None:
        """A handler succeeded: earlier failures are the fault of their messages.

        A pause that a handler has requested still lasts its full time: the successful call may have begun before it.
        """
        if self._asked and self.resume_at is not None and now < self.resume_at:
            return
        self._asked = False
        self._error = ""
        self._failed = []
        self._pauses = 0
        self._is_over_time = False
        self.resume_at = None

    def not_started(self, error: str, now: float, pause_seconds: float | None = None) -> float:
        """Record a call that failed through no message's fault; returns when to continue."""
        return self._pause(error, now, pause_seconds)

    def failed(self, messages: Iterable[Hashable], error: str, now: float) -> float | None:
        """Record a failed call about these messages. Returns None for an ordinary failure, or the end of the pause."""
        if error != self._error:
            self.succeeded(now)
            self._error = error
        call = frozenset(messages)
        self._failed = [other for other in self._failed if other.isdisjoint(call)]
        if len(self._failed) < _IN_A_ROW:
            self._failed.append(call)
        if self._is_over_time or (len(self._failed) < _IN_A_ROW and self.resume_at is None):
            return None
        if self.resume_at is None:
            self._began = now
        if now - self._began >= self._believed_seconds():
            # Until a success there are no more pauses, and every attempt counts.
            self._is_over_time, self.resume_at = True, None
            return None
        return self._pause(error, now)

    def _pause(self, error: str, now: float, wished_seconds: float | None = None) -> float:
        self._error = error
        self._asked = self._asked or wished_seconds is not None
        if self.resume_at is None:
            self._began = now
        elif now < self.resume_at:
            # The call already ran when the pause began.
            self.resume_at = max(self.resume_at, now + (wished_seconds or 0.0))
            return self.resume_at
        self._pauses += 1
        pause = min(_PAUSES.pause_seconds(self._pauses), self._subscription.retry.level_seconds(self._pauses))
        self.resume_at = now + (pause if wished_seconds is None else wished_seconds)
        return self.resume_at

    def _believed_seconds(self) -> float:
        retry = self._subscription.retry
        if retry.max_attempts is None:
            return float("inf")
        return sum(retry.delay_seconds(attempt) for attempt in range(1, retry.max_attempts))


# -- subscriptions ---------------------------------------------------------------------------------


class SubscriptionRunner:
    """The lanes and the worker pool of a subscription. Only the dispatching thread uses it."""

    def __init__(self, subscribed: Subscribed, run: Callable[[HandlerCall], None]) -> None:
        subscription = subscribed.subscription
        self.subscribed: Final = subscribed
        self.lane: Final = _lane(subscription)
        # A message that comes from the retry queue has given up its order.
        self.retry_lane: Final[Lane] = ConcurrentLane(subscription.batch) if subscribed.ordered else self.lane
        # The lanes of its waiting messages; retried ones first.
        self.lanes: Final = (self.retry_lane, self.lane) if subscribed.ordered else (self.lane,)
        self.pool: Final = WorkerPool(
            f"{subscription.group}-{subscription.topic}", subscription.threads, run, batches=subscription.batch > 1
        )
        self.outage: Final = Outage(subscription)
        # Whether messages wait for which the pool has no room.
        self.backlog = False
        self._reported = 0

    @property
    def is_running_out(self) -> bool:
        """Whether messages wait while the threads will soon have none. Any thread."""
        return self.backlog and self.pool.waiting <= self.subscribed.subscription.threads

    def admits(self, now: float) -> bool:
        """Whether a call may be handed to the pool."""
        return self.pool.room > 0 and self.outage.admits(now, running=self.pool.in_hand > 0)

    def next_at(self, now: float) -> float | None:
        """Return when waiting messages may be handed out without a wake-up before that."""
        if self.pool.room == 0:
            return None
        resume_at = self.outage.resume_at
        if resume_at is not None and resume_at > now:
            return resume_at
        if resume_at is not None and self.pool.in_hand > 0:
            # One call at a time; its end wakes the dispatching thread.
            return None
        return min((at for lane in self.lanes if (at := lane.next_at()) is not None), default=None)

    def report_outage(self, run: Executor, instance: UUID) -> None:
        """Store in the database, for operators, that the subscription pauses, or no longer does."""
        pauses = self.outage.pauses
        if pauses == self._reported:
            return
        group_id, topic_id = self.subscribed.key
        if pauses:
            members.report_outage(run, instance, group_id, topic_id, self.outage.error)
        else:
            members.end_outage(run, instance, group_id, topic_id)
        self._reported = pauses


def _lane(subscription: Subscription) -> Lane:
    if subscription.mode is Mode.ORDERLY:
        return OrderlyLane(subscription.batch)
    if subscription.mode is Mode.KEY_ORDERED:
        return KeyOrderedLane(subscription.batch)
    return ConcurrentLane(subscription.batch)


# -- running calls ---------------------------------------------------------------------------------


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
