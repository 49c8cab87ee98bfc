"""Which call runs when, in which of the handler threads of the process, and how a thread runs it.

dispatching thread ──► SubscriptionCalls: waiting calls ──► Scheduler: handler threads ──► Caller.run
          ▲                                                                                    │
          └──────────────────── Calls: finished, timed out, abandoned ◄───────────────────────┘
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from functools import partial
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, TypeAlias

from outbox import passing_over, tracing
from outbox.broker.consumer.call import NOT_STARTED, HandlerCall, Result, SharedCalls, Sharing, TimedOut, may_join
from outbox.broker.consumer.fetch import (
    BODY,
    CONTENT_TYPE,
    HEADERS,
    LOG_ID,
    MESSAGE_ID,
    NO_HEADERS,
    deliver,
    unreadable,
)
from outbox.broker.consumer.lanes import FetchedEntry
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.consumer.subscription_runner import STUCK_LIMIT, SubscriptionCalls, SubscriptionRunner
from outbox.broker.groups.members import CallReport, CallsReport
from outbox.codec import OWN_CONTENT_TYPES, Codecs
from outbox.errors import HandlerNotStarted, HandlerTimedOut, LeaseLost, OutboxError, UndecodableBody
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler, ClaimedElsewhere, ClaimingInvoker, Disposition, Invoker, RunAlone, SharingInvoker
from outbox.subscription import Subscription, threads_of
from outbox.utils import faults, fence, log_context, measures
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)


# -- threads ---------------------------------------------------------------------------------------


# If calls may share a transaction, at most this number of calls per busy thread wait until a busy thread takes them
# into its transaction. Further calls go to other threads.
_BEHIND: Final = 4
# If the busy threads take no waiting call for this time (seconds), the calls that wait for them go to other threads.
_BEHIND_SECONDS: Final = 0.02
# If a thread has no call for this time (seconds), it ends and closes its database connections.
IDLE_SECONDS: Final = 30.0


# Runs a call in a handler thread (see `Caller.run`).
RunCall: TypeAlias = Callable[[HandlerCall, Sharing | None, Callable[[], HandlerCall | None] | None], None]


class _IdleThread:
    """A handler thread while it is idle: it waits to acquire `woken`, and then runs `task`. None: it ends."""

    __slots__ = ("task", "woken")

    def __init__(self) -> None:
        self.task: tuple[SubscriptionCalls, HandlerCall] | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class Scheduler:
    """At most `most` threads, which run the calls of all subscriptions of a process in turn.

    A thread belongs to no subscription. It keeps its database connections when it goes on to the next subscription, so
    a process with many subscriptions has as many sessions as threads. The threads start when needed and end when idle.
    The thread that became idle last gets the next call, so after a burst the other threads end with their sessions.

    A subscription that has no thread gets the next free one. The last quarter of the threads is reserved for such
    subscriptions: the slow handlers of one subscription cannot stop all others.

    A waiting call is given to a thread in three places only: `_staff`, when something has changed for its subscription;
    `_next`, when a thread has finished a call of the same subscription and no other one waits; and `take`, by which a
    call joins the transaction of a busy thread.

    The dispatching thread runs no call itself. In a trial, it ran each lone call of a short handler. This saved three
    of eight thread switches and up to 10 % of the CPU per message, but the tick and the fetch of the next message then
    waited for the COMMIT of the handler, and another thread would have to take over when a handler suddenly lasts.
    """

    def __init__(self, subscriptions: Sequence[Subscription], run: RunCall, most: int | None = None) -> None:
        """`most`: None if each subscription has its own number of threads, whatever the others have."""
        wanted = sum(one.threads for one in subscriptions)
        self._run: Final = run
        self._most: Final = wanted if most is None else threads_of(subscriptions, most)
        self._reserved: Final = max(1, self._most // 4) if self._most < wanted and self._most > 1 else 0
        # The lock for all attributes below, and for those of `SubscriptionCalls` that several threads change.
        self.lock: Final = threading.Lock()
        # The thread that became idle last is the last one here.
        self._idle: list[_IdleThread] = []
        # The subscriptions with calls that wait for a thread, first come first served. A subscription whose calls all
        # wait for its busy threads, to join their transactions, is not here.
        self._queue: dict[SubscriptionCalls, None] = {}
        # `_alive`: the number of threads, without those of abandoned calls. `_busy`: how many of them run a call.
        self._alive = 0
        self._busy = 0
        self._started: list[threading.Thread] = []
        self._numbers = itertools.count(1)
        self._is_stopped = False

    def stop(self, *, within_seconds: float) -> None:
        """End the threads. Threads that are stuck in a handler remain as daemon threads."""
        with self.lock:
            self._is_stopped = True
            started, are_stuck = self._started, len(self._started) > self._alive
            while self._idle:
                self._alive -= 1
                self._idle.pop().woken.release()
        deadline = time.monotonic() + within_seconds
        for thread in started:
            thread.join(0.1 if are_stuck else max(0.0, deadline - time.monotonic()))

    # -- the dispatching thread -------------------------------------------------------------------

    def submit(self, calls: SubscriptionCalls, work: HandlerCall) -> None:
        """Run a call as soon as a thread is free. If it may join the transaction of a busy thread, it waits for it."""
        sharing = calls.sharing
        with self.lock:
            if not calls.waiting:
                calls.taken_at = time.monotonic()
            waits = len(calls.waiting) < _BEHIND * calls.serving and sharing is not None and sharing.allowed
            calls.waiting.append(work)
            if not (waits and may_join(work)):
                self._staff(calls)

    def spread_at(self, calls: SubscriptionCalls) -> float | None:
        """Return the time at which to call `spread`; None if no call waits for a busy thread, or if no other thread may
        run it."""
        waits = bool(calls.waiting) and calls not in self._queue
        return calls.taken_at + _BEHIND_SECONDS if waits and calls.may_start else None

    def spread(self, calls: SubscriptionCalls) -> None:
        """Give the waiting calls of a subscription to other threads than its busy ones."""
        with self.lock:
            self._staff(calls)

    def withdraw(self, calls: SubscriptionCalls) -> list[HandlerCall]:
        """Remove and return the submitted calls that no thread has taken."""
        with self.lock:
            return [self._first(calls) for _ in range(len(calls.waiting))]

    def replace(self, calls: SubscriptionCalls) -> None:
        """Replace the thread of an abandoned call, which ends as soon as its call returns."""
        with self.lock:
            calls.stuck += 1
            calls.serving -= 1
            self._alive -= 1
            self._busy -= 1
            self._staff(calls)
        if calls.frozen:
            logger.error(
                "%s: %d handlers are stuck; outbox starts no more threads for this subscription",
                calls.name,
                calls.stuck,
            )

    def unstuck(self, calls: SubscriptionCalls) -> None:
        """Record that an abandoned call has returned. The thread of this call ends."""
        with self.lock:
            calls.stuck -= 1
            self._staff(calls)

    # -- handler threads --------------------------------------------------------------------------

    def take(self, calls: SubscriptionCalls) -> HandlerCall | None:
        """Return a call that may join the transaction of the thread that asks, or None. Only a thread that runs a call
        of this subscription uses this method."""
        with self.lock:
            return self._first(calls) if calls.waiting and may_join(calls.waiting[0]) else None

    def _loop(self, thread: _IdleThread, number: int) -> None:
        task: tuple[SubscriptionCalls, HandlerCall] | None = None
        served: SubscriptionCalls | None = None
        while (task := task or self._wait(thread)) is not None:
            calls, work = task
            if calls is not served:
                threading.current_thread().name = f"{calls.name}-{number}"
                served = calls
            sharing = calls.sharing
            shares = sharing is not None and calls.waiting and sharing.allowed and may_join(work)
            self._run(work, sharing, partial(self.take, calls) if shares else None)
            if work.is_given_up:
                # Another thread has replaced this one.
                return
            task = self._next(calls, thread)

    def _next(self, calls: SubscriptionCalls, thread: _IdleThread) -> tuple[SubscriptionCalls, HandlerCall] | None:
        """Return the next call for the thread that has run a call of this subscription. If there is none, or another
        subscription waits, this thread is idle from now on, and None is returned."""
        with self.lock:
            self._busy -= 1
            calls.serving -= 1
            if self._is_stopped:
                self._alive -= 1
                thread.woken.release()
            elif calls.waiting and not self._queue and self._admits(calls):
                return calls, self._begin(calls)
            else:
                # This thread is the first one to be woken, if a call waits.
                self._idle.append(thread)
                self._staff(calls)
            return None

    def _wait(self, thread: _IdleThread) -> tuple[SubscriptionCalls, HandlerCall] | None:
        """Return the call for an idle thread; None if the threads stop, or if this thread was idle for too long."""
        if not thread.woken.acquire(timeout=IDLE_SECONDS):
            with self.lock:
                if thread in self._idle:
                    self._idle.remove(thread)
                    self._alive -= 1
                    return None
            # Another thread wakes this one at this moment.
            thread.woken.acquire()
        task, thread.task = thread.task, None
        return task

    # -- with the lock ----------------------------------------------------------------------------

    def _staff(self, calls: SubscriptionCalls) -> None:
        """Let threads take the calls of this subscription, and of those that wait already."""
        if calls.waiting:
            self._queue.setdefault(calls)
        while (self._idle or self._alive < self._most) and not self._is_stopped:
            first = next(filter(self._admits, self._queue), None)
            if first is None:
                return
            try:
                thread = self._idle.pop() if self._idle else self._start()
            except RuntimeError:
                # The system refuses a further thread. The call waits for one that exists, if there is any.
                if not self._alive:
                    raise
                return
            thread.task = (first, self._begin(first))
            thread.woken.release()

    def _start(self) -> _IdleThread:
        idle = _IdleThread()
        thread = threading.Thread(target=self._loop, args=[idle, next(self._numbers)], daemon=True)
        thread.start()
        self._alive += 1
        self._started = [*(known for known in self._started if known.is_alive()), thread]
        return idle

    def _admits(self, calls: SubscriptionCalls) -> bool:
        return calls.may_start and (not calls.serving or self._busy < self._most - self._reserved)

    def _begin(self, calls: SubscriptionCalls) -> HandlerCall:
        work = self._first(calls)
        if calls in self._queue:
            # The other subscriptions that wait come first.
            self._queue.pop(calls)
            self._queue[calls] = None
        calls.serving += 1
        self._busy += 1
        return work

    def _first(self, calls: SubscriptionCalls) -> HandlerCall:
        """Remove and return the first waiting call."""
        calls.taken_at = time.monotonic()
        work = calls.waiting.popleft()
        if not calls.waiting:
            self._queue.pop(calls, None)
        return work


# -- running calls ---------------------------------------------------------------------------------


# The result of a finished call waits at most this time (seconds) for the dispatching thread, if no other work needs the
# result.
COLLECT_SECONDS: Final = 0.05


def _time_over(work: HandlerCall) -> OutboxError:
    """Return the result of a call that has run for too long."""
    if work.commits:
        # If this were the last attempt, a message whose effects are stored would be a dead letter.
        return LeaseLost(f"{work.abandoned}, and its transaction may have committed. The next attempt asks the inbox.")
    return HandlerTimedOut(f"{work.abandoned}. The attempt counts as failed; outbox ignores a late result.")


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

    def __init__(self, runners: Mapping[tuple[int, int], SubscriptionRunner], scheduler: Scheduler) -> None:
        self._runners = runners
        self._scheduler = scheduler
        # Whether the handler of any subscription runs for a claimed message.
        self.has_claims: Final = any(runner.subscribed.claims for runner in runners.values())
        self.has_admissions: Final = any(runner.admission is not None for runner in runners.values())
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
        may_wait = looks and not self.watched
        return seconds if may_wait or not self._finished else 0.0

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
        for work in (*self._running, *self._finished):
            work.redelivery, work.renew_at = None, 0.0

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
        self.hold(work)
        work.may_share = True
        now = time.monotonic()
        if self._collect_at < now:
            self._collect_at = now + COLLECT_SECONDS
        self._scheduler.submit(self._runners[work.subscribed.key].calls, work)

    def hold(self, work: HandlerCall) -> None:
        """Count the call as running, but do not start its handler yet. The caller then calls `start` or `refuse`."""
        for item in work.items:
            item.queue.running += 1
        self._running.add(work)
        self._runners[work.subscribed.key].calls.in_hand += 1

    def start(self, work: HandlerCall) -> None:
        """Start a call that `hold` has counted as running."""
        self._scheduler.submit(self._runners[work.subscribed.key].calls, work)

    def refuse(self, work: HandlerCall, result: Result) -> None:
        """End a held call without starting its handler, and give each of its messages this result."""
        work.results = [result] * len(work.items)
        self._finished.append(work)

    def runs_beside(self, work: HandlerCall) -> bool:
        """Return whether a handler call other than `work` is running. Abandoned calls do not count."""
        return len(self._running) > 1 or (bool(self._running) and work not in self._running)

    def take_back(self) -> None:
        """End the waiting calls of each subscription that starts no calls now. They count as not started."""
        for runner in self._runners.values():
            if runner.calls.waiting and runner.calls.is_closed:
                for work in self._scheduler.withdraw(runner.calls):
                    self.refuse(work, NOT_STARTED)

    def hung(self) -> str:
        """Return why this process cannot continue to handle its messages; '' if it can.

        One reason is that so many handlers hang that no more threads start for their subscription. The other reason is
        that a key or queue still waits for an abandoned call that has run for twice its timeout.
        """
        for runner in self._runners.values():
            if runner.calls.frozen:
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

    def take_ended(self) -> Iterator[tuple[HandlerCall, Sequence[Result]]]:
        """Yield each call that is over, with its results: first finished calls, then calls that have timed out."""
        while self._finished:
            work = self._finished.popleft()
            if work.given_back:
                continue
            if work.abandoned:
                self._returned_late(work)
                continue
            self._running.discard(work)
            self._runners[work.subscribed.key].calls.in_hand -= 1
            yield work, work.results
        for work in self._overdue() if self._running else ():
            self._abandon(work)
            yield work, [_time_over(work)] * len(work.items)
            for other in self._sharing_with(work):
                yield other, [NOT_STARTED] * len(other.items)

    def _abandon(self, work: HandlerCall) -> None:
        self.abandoned += 1
        self._running.discard(work)
        calls = self._runners[work.subscribed.key].calls
        calls.in_hand -= 1
        self._scheduler.replace(calls)

    def _sharing_with(self, hanging: HandlerCall) -> Iterator[HandlerCall]:
        """End and yield the unfinished calls that share the transaction of a call that has timed out.

        Their effects are rolled back with that transaction, so these calls run again. A call that was rolled back in
        this way does not count as an attempt.
        """
        for work in tuple(hanging.shares.calls if hanging.shares is not None else ()):
            if work in self._running and not work.results:
                work.abandoned = f"{hanging.abandoned}, and this call shares the transaction of that handler call"
                work.given_back = True
                self._running.discard(work)
                self._runners[work.subscribed.key].calls.in_hand -= 1
                yield work

    def keep_until_returned(self, work: HandlerCall, back: list[FetchedEntry]) -> None:
        """Keep the key or queue of a stuck call blocked until the call returns. Then try these messages again.

        This is for ordered modes, and for an admission by which messages wait for their key.
        """
        self._stuck[work] = back

    def drop(self, queue: OwnedQueue, from_offset: int) -> None:
        """Do not try the messages of stuck calls again that are in this queue at `from_offset` or higher."""
        for back in self._stuck.values():
            back[:] = [item for item in back if item.queue is not queue or item.offset < from_offset]

    def _overdue(self) -> list[HandlerCall]:
        now = time.monotonic()
        overdue: list[HandlerCall] = []
        for work in self._running:
            limit = work.subscribed.subscription.timeout_seconds
            # Read the time once: the handler's thread sets it to None when the next message joins.
            began = work.started_at
            if began is not None and now - began >= limit and not work.results:
                work.abandoned = f"the handler of group {work.subscribed.group.name!r} ran longer than {limit:g} s"
                # At once: its thread may return at this moment, and must know that another one replaces it.
                if work.shares is not None:
                    work.shares.is_given_up = True
                overdue.append(work)
        return overdue

    def _returned_late(self, work: HandlerCall) -> None:
        """Record that an abandoned call has returned: its result does not count, but its key or queue may continue."""
        self.abandoned -= 1
        self._scheduler.unstuck(self._runners[work.subscribed.key].calls)
        back = self._stuck.pop(work, None)
        if back is not None:
            back = [item for item in back if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)]
            work.lane.end(work.items, back)


# -- a call in its thread --------------------------------------------------------------------------
#
# A handler thread calls the handler with decoded bodies, inside a fence. An error becomes the result of its message.


# A thread waits at most this time (seconds) until the others have decoded.
_TURN_SECONDS: Final = 0.05


class Caller:
    """Runs a call, stores the results in the call object, and passes this object to `finished`."""

    def __init__(
        self,
        invoker: Invoker,
        codecs: Codecs,
        finished: Callable[[HandlerCall], None],
        running: RunningCalls | None = None,
        share: SharingInvoker | None = None,
        claim: ClaimingInvoker | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._invoker = invoker
        self._share = share
        self._claim = claim
        self._wake = wake
        self._codecs = codecs
        self.finished: Final = finished
        self._running = running
        # A decoding thread holds the interpreter lock all the time. With `_decoding`, only one thread decodes at a
        # time. If several threads decoded, the dispatching thread would wait one switch interval for each of these
        # threads. Codecs may be code of the project: if one hangs, the other threads decode without their turn.
        self._decoding = threading.Lock()
        # For each subscription, a function that makes the body for its handler once more.
        self._decoders: dict[Subscribed, Callable[[Message], Any]] = {}

    def run(
        self, work: HandlerCall, sharing: Sharing | None, take: Callable[[], HandlerCall | None] | None = None
    ) -> None:
        """Call the handler for the messages of this call that may be started now.

        With `take`, which returns a further waiting call or None, run such calls in the same transaction. `sharing`:
        whether the calls of the subscription may ever share a transaction.
        """
        if take is not None and sharing is not None:
            self._run_shared(SharedCalls(work, sharing, take, self), sharing)
            return
        self._run_alone(work, sharing)
        self.finished(work)

    def _run_alone(self, work: HandlerCall, sharing: Sharing | None) -> None:
        try:
            # Context variables that a handler leaves behind, and with them Django's active language and time zone, must
            # not reach the next message of this thread.
            results = Context().run(self._call, work, sharing)
        except BaseException as error:
            # An error of this code or of the invoker must not end the thread. Such an error counts as a failed attempt.
            logger.error(
                "calling the handler of group %r failed", work.subscribed.subscription.group, exc_info=printable(error)
            )
            results = [error] * len(work.items)
        work.results = _contained(work, results)

    def _run_shared(self, shared: SharedCalls, sharing: Sharing) -> None:
        """Run the first call and the calls that join its transaction. If the transaction does not commit a call, run
        this call again in its own transaction."""
        results: list[Result | RunAlone]
        try:
            results = Context().run(self._call, shared.calls[0], sharing, shared)
        except BaseException as error:
            logger.error(
                "calling the handler of group %r failed",
                shared.calls[0].subscribed.subscription.group,
                exc_info=printable(error),
            )
            results = [RunAlone.RUN_ALONE] * (len(shared.calls) - 1) + [error]
        # Compare by identity: an error of a handler may define `__eq__`, which may raise.
        if id(RunAlone.RUN_ALONE) in map(id, results):
            sharing.failed()
        elif len(shared.calls) > 1:
            sharing.worked()
        for work in shared.calls:
            work.started_at = None
        for work, result in zip(shared.calls, results, strict=True):
            if result is not RunAlone.RUN_ALONE and not _may_be_passed(work, result):
                work.results = _contained(work, [result])
            elif work.is_given_up:
                # Another thread has replaced this thread. A call that joined in that moment goes back to its lane.
                work.results = [NOT_STARTED]
            else:
                self._run_alone(work, sharing)
            self.finished(work)

    def _call(self, work: HandlerCall, sharing: Sharing | None, shared: SharedCalls | None = None) -> list[Any]:
        """Return the results of the call, followed by the results of the calls that have joined its transaction.

        The context (contextvars) of the caller ends with the call.
        """
        work.started_at = time.monotonic()
        work.commits = False
        faults.point("consumer.before_handler")
        results: list[Any] = [NOT_STARTED] * len(work.items)
        deliveries, places = self._deliveries_in_turn(work, results)
        if not deliveries:
            return results
        attempt = work if shared is None else shared
        fence.begin(attempt.fence_reason, attempt.committing)
        with _Observed(work, deliveries, places, self._running) as observed:
            outcomes: Sequence[Any]
            subscribed = work.subscribed
            subscription, handler, generation = subscribed.subscription, subscribed.handler, subscribed.group.generation
            claim = self._claim if subscribed.claims else None
            if sharing is not None:
                handler = sharing.timed(handler)
            if claim is not None:
                outcomes = self._invoke_claiming(claim, work, deliveries, handler)
            elif shared is None or self._share is None:
                outcomes = self._invoker(subscription, handler, deliveries, generation=generation)
            else:
                outcomes = self._share(subscription, handler, deliveries[0], shared, generation=shared.generation)
            if shared is None and isinstance(outcomes[0], Exception) and passing_over.is_to_pass(deliveries, outcomes):
                outcomes = self._pass_over(claim, work, deliveries, outcomes[0])
            observed.outcomes = outcomes
        joined = len(shared.calls) - 1 if shared is not None else 0
        if len(outcomes) != len(places) + joined:
            raise OutboxError(
                f"the invoker returned {len(outcomes)} results for {len(places) + joined} deliveries of group "
                f"{work.subscribed.group.name!r}: it must return one result per delivery."
            )
        if len(places) == len(results):
            return list(outcomes)
        for place, outcome in zip(places, outcomes, strict=False):
            results[place] = outcome
        return [*results, *outcomes[len(places) :]]

    def _pass_over(
        self, claim: ClaimingInvoker | None, work: HandlerCall, deliveries: Sequence[Delivery], error: object
    ) -> Sequence[Any]:
        """Call the invoker for erased messages at which the handler has failed, with a handler that does nothing."""
        passing_over.report(deliveries, error)
        if claim is not None:
            return self._invoke_claiming(claim, work, deliveries, passing_over.do_nothing)
        subscribed, handler = work.subscribed, passing_over.do_nothing
        return self._invoker(subscribed.subscription, handler, deliveries, generation=subscribed.group.generation)

    def _invoke_claiming(
        self, claim: ClaimingInvoker, work: HandlerCall, deliveries: Sequence[Delivery], handler: AnyHandler
    ) -> Sequence[Disposition | Exception | ClaimedElsewhere]:
        subscribed = work.subscribed
        [delivery] = deliveries

        def claimed(term_seconds: float) -> None:
            if _is_over(work.items[0]):
                raise TimedOut(_OVER)
            work.claimed(term_seconds)
            # The dispatching thread may sleep for longer than the message stays in its queue.
            self._wake()

        generation = subscribed.group.generation
        return [claim(subscribed.subscription, handler, delivery, claimed, generation=generation)]

    def deliver_joined(self, work: HandlerCall) -> Delivery | None:
        """Return the delivery of a call that joins a transaction. If its handler cannot be called, store the result."""
        results: list[Result] = [NOT_STARTED]
        try:
            deliveries, _ = self._deliveries_in_turn(work, results)
        except BaseException as error:
            logger.error(
                "decoding a message of group %r failed", work.subscribed.subscription.group, exc_info=printable(error)
            )
            deliveries, results = [], [error]
        if deliveries:
            return deliveries[0]
        work.results = _contained(work, results)
        return None

    def joined(self, previous: HandlerCall, work: HandlerCall, delivery: Delivery) -> AbstractContextManager[object]:
        """The context in which the handler runs for `work`, a call that has joined the transaction of `previous`."""
        if self._running is not None:
            _forget(previous, self._running)
        faults.point("consumer.before_handler")
        return _Observed(work, [delivery], [0], self._running)

    def _decoder(self, subscribed: Subscribed) -> Callable[[Message], Any]:
        decoder = self._decoders[subscribed] = subscribed.subscription.decoder(self._codecs.decode)
        return decoder

    def _deliveries_in_turn(self, work: HandlerCall, results: list[Result]) -> tuple[list[Delivery], list[int]]:
        """Do the same as `_deliveries`, while no other thread decodes, unless it takes long."""
        has_turn = self._decoding.acquire(timeout=_TURN_SECONDS)
        try:
            return self._deliveries(work, results)
        finally:
            if has_turn:
                self._decoding.release()

    def _deliveries(self, work: HandlerCall, results: list[Result]) -> tuple[list[Delivery], list[int]]:
        """Return the deliveries and their places in the call.

        If a body cannot be decoded, or the key of its subject cannot be read now, the error becomes the result of the
        message. If the time limit of a message is over, the result of the message is TimedOut. If only newer code can
        read the message, the result is NeedsNewerCode.
        """
        subscribed = work.subscribed
        group, topic, reader = subscribed.group.name, subscribed.subscription.topic, subscribed.reader
        decode = self._codecs.decode
        decode_again = self._decoders.get(subscribed) or self._decoder(subscribed)
        # Check the leases after the fault point. If a test freezes the process at the fault point, no handler starts
        # with an expired lease.
        lease = subscribed.admission_lease
        is_admitted = lease is None or lease.admits(work.admission_epoch)
        claims = self._claim is not None and subscribed.claims
        startable: dict[OwnedQueue, bool] = {}
        deliveries: list[Delivery] = []
        places: list[int] = []
        for place, item in enumerate(work.items):
            if item.queue not in startable:
                startable[item.queue] = is_admitted and item.queue.may_start()
            if not startable[item.queue]:
                continue
            # A claimed message may be handled already, or its handler may still run. So the claim is asked first.
            if item.ends_at is not None and not claims and _is_over(item):
                results[place] = TimedOut(_OVER)
                continue
            row = item.row
            assert row is not None
            if reason := unreadable(row):
                results[place] = UndecodableBody(
                    f"message {row[MESSAGE_ID]} (log id {row[LOG_ID]}) cannot be read: {reason}. A program beside "
                    "outbox stored this row. Publish the message again with outbox, and discard this dead letter."
                )
                continue
            try:
                body = decode(row[CONTENT_TYPE], row[BODY])
                if reader is not None:
                    body = reader.read(topic, row[HEADERS] or NO_HEADERS, body)
            except (UndecodableBody, HandlerNotStarted) as error:
                results[place] = error
                continue
            attempt = item.retries + item.in_place + 1
            deliveries.append(deliver(row, topic, body, group, item.queue.name, item.offset, attempt, decode_again))
            places.append(place)
        return deliveries, places


class _Observed:
    """Writes a note, a trace and the measured time of a handler call, and marks the log records of the handler.

    The note is in the file that the parent of this process reads. `outcomes`: the results of the call so far, followed
    by those of other calls.
    """

    __slots__ = ("_began_at", "_deliveries", "_places", "_recorder", "_running", "_traced", "_work", "outcomes")

    def __init__(
        self, work: HandlerCall, deliveries: Sequence[Delivery], places: Sequence[int], running: RunningCalls | None
    ) -> None:
        self._work = work
        self._deliveries = deliveries
        self._places = places
        self._running = running
        self._traced: tuple[AbstractContextManager[tracing.Conclude], tracing.Conclude] | None = None
        self._recorder = measures.recorder
        self._began_at = 0.0
        self.outcomes: Sequence[object] = _HANDLED

    def __enter__(self) -> _Observed:
        work, deliveries = self._work, self._deliveries
        log_context.begin(deliveries)
        if tracing.tracer is not None:
            traced = tracing.tracer.handling(deliveries)
            self._traced = traced, traced.__enter__()
        if self._recorder is not None:
            self._began_at = time.time()
        if self._running is not None:
            log_ids = [row[LOG_ID] for place in self._places if (row := work.items[place].row) is not None]
            work.note = self._running.note(work.subscribed.group.group_id, log_ids, alone=work.alone)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running is not None:
            _forget(self._work, self._running)
        outcomes = self.outcomes[: len(self._deliveries)]
        if self._traced is not None:
            traced, conclude = self._traced
            if error is None:
                conclude(outcomes)
            traced.__exit__(kind, error, traceback)
        if self._recorder is not None and error is None:
            self._measure(self._recorder, outcomes)

    def _measure(self, recorder: measures.Recorder, outcomes: Sequence[object]) -> None:
        work, began_at = self._work, self._began_at
        subscription = work.subscribed.subscription
        # For a claimed message, only the claim tells whether an attempt begins after the time limit.
        failures = [one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, TimedOut)]
        took = (work.returned_at or time.time()) - began_at
        waits, count = _waits(self._deliveries, began_at), len(self._deliveries)
        recorder.handled(subscription.group, subscription.topic, waits, took, count=count, failures=failures)


_HANDLED: Final = (Disposition.HANDLED,)


def _forget(work: HandlerCall, running: RunningCalls) -> None:
    """Remove the note of a call from the file of running calls."""
    if work.note is not None:
        running.forget(work.note)
        work.note = None


def _contained(work: HandlerCall, results: Sequence[Any]) -> list[Any]:
    return list(work.subscribed.subscription.contained(results))


def _may_be_passed(work: HandlerCall, result: Any) -> bool:
    """Whether the message of a call that has failed in a shared transaction may be erased.

    Such a call runs again alone, because only then can its message be passed over.
    """
    row = work.items[0].row
    if row is None or not isinstance(result, Exception):
        return False
    return str(row[CONTENT_TYPE]).startswith(OWN_CONTENT_TYPES)


_OVER: Final = "the time limit of the message was over before this attempt"


def _is_over(item: FetchedEntry) -> bool:
    """Whether the time limit of the message is over, so that no attempt may begin."""
    return item.ends_at is not None and time.monotonic() >= item.ends_at


def _waits(deliveries: Sequence[Delivery], now: float) -> list[float]:
    """Return how long (seconds) each message has waited for its first attempt.

    The wait begins when the message is published or due, whichever is later, by this machine's clock.
    """
    since = [
        max(filter(None, (delivery.message.born_at, delivery.message.deliver_at)))
        for delivery in deliveries
        if delivery.attempt == 1
    ]
    return [max(0.0, now - moment.timestamp()) for moment in since]
