"""Track handler calls from start to result, and abandoned calls for as long as they run.

Each subscription has a `SubscriptionRunner`, which holds its lanes, its threads and its `Outage`.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final, Protocol
from uuid import UUID

from outbox import hooks
from outbox.broker.consumer.admission import admission_of
from outbox.broker.consumer.fetch import MESSAGE_ID
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.consumer.shared_calls import Sharing
from outbox.broker.consumer.work import (
    NOT_STARTED,
    ConcurrentLane,
    FetchedEntry,
    HandlerCall,
    KeyOrderedLane,
    Lane,
    OrderlyLane,
    Result,
    counted_by_queue,
)
from outbox.broker.consumer.worker_pool import STUCK_LIMIT, HandlerThreads, RunCall, WorkerPool
from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.broker.groups.members import CallReport, CallsReport
from outbox.errors import HandlerTimedOut
from outbox.ports import Disposition
from outbox.subscription import Mode, Subscription
from outbox.utils.backoff import Backoff

logger = logging.getLogger(__name__)


# -- outages ---------------------------------------------------------------------------------------
#
# This code distinguishes a poison message from a service that is down. If different messages fail in a row with the
# same error, it assumes that a service is down.
#
# While a service is down, every message would fail until it is a dead letter. To prevent this, three failed calls in a
# row count as an **outage** if they have the same error and no message in common. In an outage, the subscription
# pauses, its failed messages stay in this process, and these failures do not count as attempts. After the pause, the
# subscription runs one call at a time to test whether the outage is over. The first successful call ends the outage.
#
# A few poison messages look like an outage if no other messages arrive. So an outage lasts at most as long as all retry
# delays of one message together. After this longest time, failures count as attempts again, so each message finally
# succeeds or is given up. An error whose text contains the message id is never the same as another one, so it
# is no outage.


_IN_A_ROW: Final = 3
_PAUSES: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)
# A handler that was not called has cost nothing but an attempt to connect, so the next attempt comes soon: after a
# restart of the server, messages would otherwise wait for up to a minute.
_LONGEST_BEFORE_CALLS_SECONDS: Final = 10.0


class Outage:
    """The consecutive failures of one subscription. Only the dispatching thread uses an `Outage`.

    All times are values of time.monotonic.
    """

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._error = ""
        # The messages of each failed call in the present series. All calls of the series failed with `_error`, and no
        # two of them share a message.
        self._failed: list[frozenset[Hashable]] = []
        self._pauses = 0
        self._began = 0.0
        self._is_over_time = False
        # Whether a handler has requested the length of the current pause.
        self._asked = False
        self.resume_at: float | None = None

    @property
    def error(self) -> str:
        """The error of the current outage; '' if there is no outage."""
        return self._error if self.resume_at is not None else ""

    @property
    def pauses(self) -> int:
        """The number of pauses in the current outage; 0 if there is no outage."""
        return self._pauses if self.resume_at is not None else 0

    def admits(self, now: float, *, running: bool) -> bool:
        """Return whether a call may be started. In an outage, one call at a time may be started after the pause."""
        return self.resume_at is None or (now >= self.resume_at and not running)

    def succeeded(self, now: float = math.inf) -> None:
        """Record a successful call, which ends the outage and the series of failures.

        A pause that a handler has requested still lasts its full time, because the successful call may have begun
        before the request.
        """
        if self._asked and self.resume_at is not None and now < self.resume_at:
            return
        self._asked = False
        self._error = ""
        self._failed = []
        self._pauses = 0
        self._is_over_time = False
        self.resume_at = None

    def not_started(self, error: str, now: float) -> float:
        """Record a call that failed before the handler. Return the time at which the pause ends."""
        return self._pause(error, now, longest_seconds=_LONGEST_BEFORE_CALLS_SECONDS)

    def unavailable(self, error: str, now: float, pause_seconds: float | None) -> float:
        """Record a call whose handler has said that its service is down. Return the time at which the pause ends."""
        return self._pause(error, now, pause_seconds)

    def failed(self, messages: Iterable[Hashable], error: str, now: float) -> float | None:
        """Record that a call with these messages has failed.

        Return the end of the pause, or None if the failure counts as an attempt.
        """
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
            # Until a call succeeds, there are no more pauses, and every failure counts as an attempt.
            self._is_over_time, self.resume_at = True, None
            return None
        return self._pause(error, now)

    def _pause(
        self, error: str, now: float, wished_seconds: float | None = None, *, longest_seconds: float = math.inf
    ) -> float:
        self._error = error
        self._asked = self._asked or wished_seconds is not None
        if self.resume_at is None:
            self._began = now
        elif now < self.resume_at:
            # This call was still running when the pause began, so its failure does not start another pause.
            self.resume_at = max(self.resume_at, now + (wished_seconds or 0.0))
            return self.resume_at
        self._pauses += 1
        level = self._subscription.retry.level_seconds(self._pauses)
        pause = min(_PAUSES.pause_seconds(self._pauses), level, longest_seconds)
        self.resume_at = now + (pause if wished_seconds is None else wished_seconds)
        return self.resume_at

    def _believed_seconds(self) -> float:
        retry = self._subscription.retry
        if retry.max_attempts is None:
            return float("inf")
        return sum(retry.delay_seconds(attempt) for attempt in range(1, retry.max_attempts))


# -- reports of parts ------------------------------------------------------------------------------


class ResultReport(Protocol):
    """What the calls of one subscription in this process have met, for operators. Only the dispatching thread uses it.

    A part joins with `hooks.add_result_report`.
    """

    def note(self, results: Sequence[Result]) -> None:
        """Record the results of a call whose messages are not all handled."""

    def report(self, run: Executor, instance: UUID, key: tuple[int, int]) -> None:
        """Store what has changed since the last call. `key`: the ids of the group and the topic."""


def _result_reports(subscription: Subscription) -> list[ResultReport]:
    paths = (hooks.result_reports.get(type(option)) for option in subscription.options)
    return [hooks.resolved(path)() for path in paths if path is not None]


# -- subscriptions ---------------------------------------------------------------------------------


class SubscriptionRunner:
    """The lanes and the worker pool of one subscription.

    Only the dispatching thread uses this class, but any thread may read `is_running_out`.
    """

    def __init__(
        self, subscribed: Subscribed, run: RunCall, *, sharing_calls: int = 1, threads: HandlerThreads | None = None
    ) -> None:
        subscription = subscribed.subscription
        self.subscribed: Final = subscribed
        option, kind = admission_of(subscribed) or (None, None)
        self.lane: Final = _lane(subscription)
        # Messages from the retry queue have given up their order, so they wait in a concurrent lane.
        self.retry_lane: Final[Lane] = ConcurrentLane(subscription.batch) if subscribed.ordered else self.lane
        # The lanes in which messages wait. The dispatching thread takes messages from the retry lane first.
        self.lanes: Final = (self.retry_lane, self.lane) if subscribed.ordered else (self.lane,)
        # In a subscription that is ordered, gets batches or claims messages, each call has its own transaction.
        shares = sharing_calls > 1 and subscription.batch == 1 and not subscribed.ordered and not subscribed.claims
        self.pool: Final = WorkerPool(
            f"{subscription.group}-{subscription.topic}",
            subscription.threads,
            run,
            shared_threads=threads or HandlerThreads([subscription]),
            batches=subscription.batch > 1,
            sharing=Sharing(sharing_calls) if shares else None,
        )
        # None if no option of the subscription decides when its calls start.
        self.admission: Final = kind(option, subscribed, self.pool, self.lanes) if kind is not None else None
        self.outage: Final = Outage(subscription)
        self.reports: Final = _result_reports(subscription)
        # Whether messages may wait in the lanes because the pool accepts no more calls.
        self.backlog = False
        # The number of pauses of the outage that is stored for operators.
        self._reported = 0

    @property
    def is_running_out(self) -> bool:
        """Whether the handler threads will soon have no call, although messages may wait in the lanes.

        Any thread may read this property.
        """
        return self.backlog and self.pool.waiting <= self.pool.usable_threads

    def admits(self, now: float) -> bool:
        """Return whether the pool may get another call now."""
        if self.admission is not None and not self.admission.admits(now):
            return False
        return not self.pool.is_full and (self.outage.resume_at is None or self.may_call(now))

    def may_call(self, now: float) -> bool:
        """Return whether an outage allows a call now."""
        return self.outage.admits(now, running=self.pool.in_hand > 0)

    def next_at(self, now: float) -> float | None:
        """Return the next time at which the dispatching thread should look for messages to call a handler with. If no
        such time is known, return None."""
        if self.pool.is_full and (self.admission is None or self.pool.in_hand > 0):
            # The end of a call wakes the dispatching thread. A process that admits no call wakes for itself.
            return None
        resume_at = self.outage.resume_at
        if resume_at is not None and resume_at > now:
            return resume_at
        if resume_at is not None and self.pool.in_hand > 0:
            # In an outage only one call runs at a time. The end of that call wakes the dispatching thread.
            return None
        earliest: float | None = None
        for lane in self.lanes:
            at = lane.next_at()
            if at is not None and (earliest is None or at < earliest):
                earliest = at
        return earliest

    def report(self, run: Executor, instance: UUID) -> None:
        """Store for operators what has changed since the last call: whether there is an outage, and what parts tell."""
        if (pauses := self.outage.pauses) != self._reported:
            self._report_outage(run, instance, pauses)
        for one in self.reports:
            one.report(run, instance, self.subscribed.key)

    def _report_outage(self, run: Executor, instance: UUID, pauses: int) -> None:
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
    for option in subscription.options:
        if option.has_lane:
            lane: Lane = hooks.resolved(hooks.lanes[type(option)])(option)
            return lane
    return ConcurrentLane(subscription.batch)


# -- running calls ---------------------------------------------------------------------------------


# The result of a finished call waits at most this time (seconds) for the dispatching thread, if no other work needs the
# result.
COLLECT_SECONDS: Final = 0.05


# The heartbeat of a process stores at most this many running calls.
_REPORTED: Final = 20


def _reported(work: HandlerCall, seconds: float) -> CallReport:
    first = next(iter(tuple(work.items)), None)
    row = first.row if first is not None else None
    return CallReport(
        group=work.subscribed.group.name,
        topic=work.subscribed.subscription.topic,
        message_id=str(row[MESSAGE_ID]) if row is not None else "",
        messages=len(work.items),
        attempt=first.attempt if first is not None else 1,
        seconds=round(seconds, 3),
    )


class Calls:
    """The running calls of this process.

    The handler threads call `finished`, any thread calls `report`, and only the dispatching thread calls all other
    methods.

    `runners` maps (group id, topic id) to the runner of the subscription.
    """

    def __init__(self, runners: Mapping[tuple[int, int], SubscriptionRunner]) -> None:
        self._runners = runners
        # Whether the handler of any subscription runs for a claimed message.
        self.has_claims: Final = any(runner.subscribed.claims for runner in runners.values())
        self._has_admissions: Final = any(runner.admission is not None for runner in runners.values())
        self._running: set[HandlerCall] = set()
        # The number of abandoned calls that have not returned. `_stuck`: those for which a key or queue waits.
        self.abandoned = 0
        self._stuck: dict[HandlerCall, list[FetchedEntry]] = {}
        self._finished: deque[HandlerCall] = deque()
        # `_asleep_until`: the time until which the dispatching thread sleeps if no other thread wakes it.
        # `_collect_at`: the time at which the dispatching thread looks for results.
        self._asleep_until = 0.0
        self._collect_at = 0.0
        # Whether every finished call wakes the dispatching thread. The dispatching thread sets this value.
        self.watched = False

    def finished(self, work: HandlerCall) -> bool:
        """Record a finished call. Return whether to wake the dispatching thread. The handler threads call this method.

        Waking the dispatching thread for each call would cost more than the handling of a message. So a successful call
        does not wake the dispatching thread if this thread wakes by itself within 50 ms, and if the handler threads
        have enough other calls.
        """
        self._finished.append(work)
        # Check the sleep time after appending (see `sleep`): a thread that is already asleep has missed the append.
        return self._asleep_until - time.monotonic() > COLLECT_SECONDS or self._is_awaited(work)

    def sleep(self, seconds: float) -> float:
        """Return how long the dispatching thread may sleep: at most `seconds`. Call `sleep` right before the wait."""
        now = time.monotonic()
        looks = self._collect_at > now
        if looks:
            seconds = min(seconds, self._collect_at - now)
        self._asleep_until = now + seconds
        # Check for finished calls after setting the sleep time: a call that finishes after the check sees the new time.
        return 0.0 if self._finished and not (looks and not self.watched) else seconds

    def _is_awaited(self, work: HandlerCall) -> bool:
        """Return whether the process needs the result of this call at once."""
        if self.watched or work.abandoned or work.subscribed.ordered or len(work.items) > 1:
            return True
        return not isinstance(work.results[0], Disposition) or self._runners[work.subscribed.key].is_running_out

    def report(self) -> CallsReport:
        """Return the calls whose handlers run now, those of abandoned calls too. Any thread may call this method."""
        now = time.monotonic()
        # To copy a set or a dict is one step of the interpreter, so the dispatching thread cannot change it meanwhile.
        running = [
            (now - work.started_at, work)
            for work in (*tuple(self._running), *tuple(self._stuck))
            if work.started_at is not None and not work.results
        ]
        longest = heapq.nlargest(_REPORTED, running, key=itemgetter(0))
        return CallsReport(len(running), [_reported(work, seconds) for seconds, work in longest])

    @property
    def any_running(self) -> bool:
        """Whether a handler call is running. Abandoned calls do not count."""
        return bool(self._running)

    @property
    def any_counting(self) -> bool:
        """Whether a handler call is running, or a finished call is not booked yet. Abandoned calls do not count."""
        return bool(self._running or self._finished)

    def deadlines(self) -> list[float]:
        """Return the times (time.monotonic) at which a running call times out, or a stuck call ends the process.

        A stuck call ends the process when it has run for twice its timeout.
        """
        found: list[float] = []
        for work in self._running:
            # Read the time once: the handler's thread sets it to None when the next message joins.
            if (began := work.started_at) is not None:
                found.append(began + work.subscribed.subscription.timeout_seconds)
        if self._stuck:
            # If a stuck call has reached its limit, the process is already ending. So for stuck calls, the method
            # returns only times in the future.
            now = time.monotonic()
            hangs = [(work.started_at, 2 * work.subscribed.subscription.timeout_seconds) for work in self._stuck]
            found += [began + seconds for began, seconds in hangs if began is not None and began + seconds > now]
        if self.has_claims:
            for work in self._claimed():
                found += [at for at in (work.leaves_at(), work.renew_at or None) if at is not None]
        return found

    def _claimed(self) -> list[HandlerCall]:
        return [work for work in self._running if work.claimed_at is not None]

    def leaving(self, now: float) -> list[HandlerCall]:
        """Return the running calls whose claimed message leaves its queue now."""
        return [
            work for work in self._claimed() if not work.results and (at := work.leaves_at()) is not None and at <= now
        ]

    def to_renew(self, now: float) -> list[HandlerCall]:
        """Return the running calls whose message has left its queue, and whose redelivery has to be postponed now."""
        return [work for work in self._claimed() if work.redelivery is not None and work.renew_at <= now]

    def forget_redeliveries(self) -> None:
        """Forget the rows that deliver claimed messages again, because these rows belong to another life of the server.

        Log ids may be used again in the new life, so a statement with an old id could change another message.
        """
        for work in self._running:
            work.redelivery = None
        for work in self._finished:
            work.redelivery = None

    def give_up_claims(self) -> Iterator[tuple[HandlerCall, Sequence[Result]]]:
        """End and yield the running calls with a claimed message, because this process ends. They store nothing."""
        for work in self._claimed():
            if not work.results:
                work.abandoned = f"the process of group {work.subscribed.group.name!r} ends before its handler"
                self._abandon(work)
                yield work, [NOT_STARTED] * len(work.items)

    def end_of_started(self, queue: OwnedQueue) -> int:
        """Return the highest offset of this queue in a running call, plus one; 0 if the queue has no running call."""
        started = [
            item.offset for work in self._running if not work.has_left for item in work.items if item.queue is queue
        ]
        return max(started, default=-1) + 1

    def submit(self, work: HandlerCall) -> None:
        """Call the handler as soon as a thread is free."""
        self._count(work)
        work.may_share = True
        now = time.monotonic()
        if self._collect_at < now:
            self._collect_at = now + COLLECT_SECONDS
        self._runners[work.subscribed.key].pool.submit(work)

    def hold(self, work: HandlerCall) -> None:
        """Count the call as running, but do not start its handler yet. The caller then calls `start` or `refuse`."""
        self._count(work)
        self._runners[work.subscribed.key].pool.reserve()

    def _count(self, work: HandlerCall) -> None:
        for queue, count in counted_by_queue(work.items).items():
            queue.started(count)
        self._running.add(work)

    def start(self, work: HandlerCall) -> None:
        """Start a call that `hold` has counted as running."""
        self._runners[work.subscribed.key].pool.start(work)

    def refuse(self, work: HandlerCall, result: Result) -> None:
        """End a held call without starting its handler, and give each of its messages this result."""
        work.results = [result] * len(work.items)
        self._finished.append(work)

    def runs_beside(self, work: HandlerCall) -> bool:
        """Return whether a handler call other than `work` is running. Abandoned calls do not count."""
        return len(self._running) > 1 or (bool(self._running) and work not in self._running)

    def take_back(self) -> None:
        """End the waiting calls of each pool that starts no calls now. They count as not started."""
        if not (self.abandoned or self._has_admissions):
            return
        for runner in self._runners.values():
            if runner.pool.calls and runner.pool.is_closed:
                for work in runner.pool.withdraw():
                    self.refuse(work, NOT_STARTED)

    def hung(self) -> str:
        """Return why this process cannot continue to handle its messages; '' if it can.

        One reason is that so many handlers hang that their pool starts no more threads. The other reason is that a key
        or queue still waits for an abandoned call that has run for twice its timeout.
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
        """Yield each call that is over, with its results: first finished calls, then calls that have timed out."""
        while self._finished:
            work = self._finished.popleft()
            if work.given_back:
                continue
            if work.abandoned:
                self._returned_late(work)
                continue
            self._running.discard(work)
            self._runners[work.subscribed.key].pool.collected()
            yield work, work.results
        for work in self._overdue() if self._running else ():
            self._abandon(work)
            error = HandlerTimedOut(f"{work.abandoned}. The attempt counts as failed; outbox ignores a late result.")
            yield work, [error] * len(work.items)
            for other in self._sharing_with(work):
                yield other, [NOT_STARTED] * len(other.items)

    def _abandon(self, work: HandlerCall) -> None:
        self.abandoned += 1
        self._running.discard(work)
        self._runners[work.subscribed.key].pool.replace_stuck()

    def _sharing_with(self, hanging: HandlerCall) -> Iterator[HandlerCall]:
        """End and yield the unfinished calls that share the transaction of a call that has timed out.

        Their effects are rolled back with that transaction, so these calls run again. A call that was rolled back in
        this way does not count as an attempt.
        """
        for work in tuple(hanging.shares):
            if work in self._running and not work.results:
                work.abandoned = f"{hanging.abandoned}, and this call shares the transaction of that handler call"
                work.given_back = True
                self._running.discard(work)
                self._runners[work.subscribed.key].pool.collected()
                yield work

    def keep_until_returned(self, work: HandlerCall, back: list[FetchedEntry]) -> None:
        """Keep the key or queue of a stuck call blocked until the call returns. Then try these messages again.

        This is for ordered modes, and for an admission by which messages wait for their key.
        """
        self._stuck[work] = back

    def _overdue(self) -> list[HandlerCall]:
        now = time.monotonic()
        overdue: list[HandlerCall] = []
        for work in self._running:
            limit = work.subscribed.subscription.timeout_seconds
            # Read the time once: the handler's thread sets it to None when the next message joins.
            began = work.started_at
            if began is not None and now - began >= limit and not work.results:
                work.abandoned = f"the handler of group {work.subscribed.group.name!r} ran longer than {limit:g} s"
                overdue.append(work)
        return overdue

    def _returned_late(self, work: HandlerCall) -> None:
        """Record that an abandoned call has returned: its result does not count, but its key or queue may continue."""
        self.abandoned -= 1
        self._runners[work.subscribed.key].pool.unstuck()
        back = self._stuck.pop(work, None)
        if back is not None:
            back = [item for item in back if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)]
            work.lane.settle(work.items, back)
