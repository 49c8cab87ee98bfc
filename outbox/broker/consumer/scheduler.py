"""Which call runs when, in which of the handler threads of the process.

    dispatching thread ──► SubscriptionCalls: waiting calls ──► Scheduler: handler threads ──► Caller.run
              ▲                                                                                    │
              └──────────────────── Calls: finished, timed out, abandoned ◄───────────────────────┘

Each subscription has a `SubscriptionRunner`, which holds its lanes, its calls and its `Outage`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, Protocol
from uuid import UUID

from outbox import hooks
from outbox.broker.consumer.call import NOT_STARTED, HandlerCall, Result, RunCall, Sharing, may_join
from outbox.broker.consumer.fetch import MESSAGE_ID
from outbox.broker.consumer.lanes import ConcurrentLane, FetchedEntry, Lane, OrderedLane
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.consumer.results import Outage
from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.broker.groups.members import CallReport, CallsReport
from outbox.errors import HandlerTimedOut, LeaseLost, OutboxError
from outbox.ports import Disposition
from outbox.subscription import Mode, Subscription, threads_of

logger = logging.getLogger(__name__)


# -- the calls of a subscription -------------------------------------------------------------------


# For each thread, up to this number of further calls wait. So a thread that has finished a call gets the next one at
# once.
_AHEAD_SINGLE: Final = 3
_AHEAD_BATCH: Final = 1
# Of calls that share transactions, a thread takes several at once.
_AHEAD_SHARED: Final = 7
# A subscription with N threads replaces at most N times this number of stuck threads.
STUCK_LIMIT: Final = 4


class SubscriptionCalls:
    """The calls of one subscription in this process, of which up to `threads` run at the same time."""

    def __init__(
        self, name: str, threads: int, lock: threading.Lock, *, batches: bool = False, sharing: Sharing | None = None
    ) -> None:
        self.name: Final = name
        self.sharing: Final = sharing
        self._threads: Final = threads
        self._ahead: Final = _AHEAD_BATCH if batches else _AHEAD_SINGLE
        # The number of submitted calls that have not ended. Only the dispatching thread changes it.
        self.in_hand = 0
        # At most this number of calls may run; None: as many as there are threads. `usable_threads`: the lower of the
        # two.
        self._allowed: int | None = None
        # Whether `_allowed` has changed, and the threads have not been given the waiting calls since.
        self.is_allowance_new = False
        self.usable_threads = threads
        # The lock of the scheduler protects these. `waiting`: the calls that no thread has taken. `serving`: how many
        # threads run calls, without those of abandoned calls. `stuck`: the number of threads whose call was abandoned
        # and has not returned. `taken_at`: the time (time.monotonic) at which a thread last took a call, or at which a
        # call was added to the empty `waiting`.
        self._lock: Final = lock
        self.waiting: Final[deque[HandlerCall]] = deque()
        self.serving = 0
        self.stuck = 0
        self.taken_at = 0.0

    @property
    def room(self) -> int:
        """The number of calls that may be submitted now."""
        if self.stuck and self.frozen:
            return 0
        ahead = _AHEAD_SHARED if self.sharing is not None and self.sharing.allowed else self._ahead
        return max(0, self.usable_threads * (1 + ahead) - self.in_hand)

    @property
    def is_full(self) -> bool:
        """Whether no more calls may be submitted now."""
        # With fewer calls than threads, there is room, unless handlers are stuck.
        return (self.stuck > 0 or self.in_hand >= self.usable_threads) and self.room == 0

    @property
    def frozen(self) -> bool:
        """Whether so many handlers are stuck that no more calls start."""
        return self.stuck > self._threads * STUCK_LIMIT

    @property
    def is_closed(self) -> bool:
        """Whether no call may start now, however many threads are free."""
        return self._allowed == 0 or self.frozen

    @property
    def running(self) -> int:
        """The number of calls that threads run, with abandoned calls whose handlers still run."""
        return self.serving + self.stuck

    @property
    def may_start(self) -> bool:
        """Whether one more call may start, if a thread is free."""
        is_allowed = self._allowed is None or self.serving + self.stuck < self._allowed
        return is_allowed and self.serving < self._threads and not (self.stuck and self.frozen)

    @property
    def waiting_for_admission(self) -> int:
        """The number of calls that wait because no more calls are allowed to run."""
        return len(self.waiting) if self._allowed is not None and self.running >= self._allowed else 0

    def allow(self, number: int | None) -> int:
        """Let at most this number of calls run at the same time; None: as many as there are threads.

        Return the number of calls that run now. If more calls run than allowed, they continue. An admission calls this
        method. The dispatching thread then lets threads take waiting calls, at the latest in its next step, even if
        this one fails meanwhile.
        """
        with self._lock:
            self.is_allowance_new = self.is_allowance_new or number != self._allowed
            self._allowed = number
            self.usable_threads = self._threads if number is None else min(self._threads, number)
            return self.running


# -- threads ---------------------------------------------------------------------------------------


# If calls may share a transaction, at most this number of calls per busy thread wait until a busy thread takes them
# into its transaction. Further calls go to other threads.
_BEHIND: Final = 4
# If the busy threads take no waiting call for this time (seconds), the calls that wait for them go to other threads.
_BEHIND_SECONDS: Final = 0.02
# If a thread has no call for this time (seconds), it ends and closes its database connections.
IDLE_SECONDS: Final = 30.0


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


# -- admission -------------------------------------------------------------------------------------
#
# A part may decide when the calls of a subscription start, beside order, threads and outages: now, not before a time,
# or when the key is free. Until then a message stays in its lane: it uses no attempt and no thread, and the messages of
# other subscriptions continue. A part joins with `hooks.add_admission`.
#
# What an admission gives is valid for a while (`AdmissionLease`), because other processes get it when this one dies. So
# the admission renews it in `prepare`, and the handler's thread looks at the lease again before it starts a call.


class Admission(Protocol):
    """Admits the calls of one subscription of this process. Only the dispatching thread uses it."""

    def __init__(self, option: Any, subscribed: Subscribed, calls: SubscriptionCalls, lanes: Sequence[Lane]) -> None:
        """`option`: the option of the subscription. `calls`: with `calls.allow`, only a number of them run at the same
        time. `lanes`: the lanes in which the messages wait."""

    def prepare(self, run: Executor, instance: UUID, now: float, *, term_seconds: float, may_start: bool) -> None:
        """Renew, take and give back what is due; called in every step, before messages are taken from the lanes.

        `run`: a connection in autocommit mode. `term_seconds`: the lease term. `may_start`: whether the dispatching
        thread starts messages of this subscription now. It must not wait.
        """

    def admits(self, now: float) -> bool:
        """Return whether a message may be taken from the lanes now, in the step of the last `prepare`."""

    def spend(self, items: Sequence[FetchedEntry], now: float) -> None:
        """Record the messages that a call has taken from a lane."""

    def next_at(self, now: float) -> float | None:
        """Return the next time at which `prepare` or `admits` may have another result; None if there is none."""

    @property
    def waiting(self) -> int:
        """The number of messages in the lanes that may wait for this admission."""

    def forget(self) -> None:
        """Forget all that was given, because the server has begun a new life. Admit nothing before the next renewal."""


# -- reports of parts ------------------------------------------------------------------------------


class ResultReport(Protocol):
    """What the calls of one subscription in this process have met, for operators. Only the dispatching thread uses it.

    A part joins with `hooks.add_result_report`.
    """

    def note(self, results: Sequence[Result]) -> None:
        """Record the results of a call whose messages are not all handled."""

    def report(self, run: Executor, instance: UUID, key: tuple[int, int]) -> None:
        """Store what has changed since the last call. `key`: the ids of the group and the topic."""


# -- subscriptions ---------------------------------------------------------------------------------


class SubscriptionRunner:
    """The lanes, the calls and the outage of one subscription.

    Only the dispatching thread uses this class, but any thread may read `is_running_out`.
    """

    def __init__(self, subscribed: Subscribed, scheduler: Scheduler, *, sharing_calls: int = 1) -> None:
        subscription = subscribed.subscription
        self.subscribed: Final = subscribed
        self.lane: Final = _lane(subscription)
        # Messages from the retry queue have given up their order, so they wait in a concurrent lane.
        self.retry_lane: Final[Lane] = ConcurrentLane(subscription.batch) if subscribed.ordered else self.lane
        # The lanes in which messages wait. The dispatching thread takes messages from the retry lane first.
        self.lanes: Final = (self.retry_lane, self.lane) if subscribed.ordered else (self.lane,)
        # In a subscription that is ordered, gets batches or claims messages, each call has its own transaction.
        shares = sharing_calls > 1 and subscription.batch == 1 and not subscribed.ordered and not subscribed.claims
        self.calls: Final = SubscriptionCalls(
            f"{subscription.group}-{subscription.topic}",
            subscription.threads,
            scheduler.lock,
            batches=subscription.batch > 1,
            sharing=Sharing(sharing_calls) if shares else None,
        )
        # None if no option of the subscription decides when its calls start. At most one does.
        self.admission: Final[Admission | None] = next(
            (
                hooks.resolved(hooks.admissions[type(option)])(option, subscribed, self.calls, self.lanes)
                for option in subscription.options
                if type(option) in hooks.admissions
            ),
            None,
        )
        self.outage: Final = Outage(subscription)
        paths = (hooks.result_reports.get(type(option)) for option in subscription.options)
        self.reports: Final[list[ResultReport]] = [hooks.resolved(path)() for path in paths if path is not None]
        # Whether messages may wait in the lanes because no more calls may be submitted.
        self.backlog = False
        # The number of pauses of the outage that is stored for operators.
        self._reported = 0

    @property
    def is_running_out(self) -> bool:
        """Whether the handler threads will soon have no call, although messages may wait in the lanes.

        Any thread may read this property.
        """
        return self.backlog and len(self.calls.waiting) <= self.calls.usable_threads

    def admits(self, now: float) -> bool:
        """Return whether another call may be submitted now."""
        if self.admission is not None and not self.admission.admits(now):
            return False
        return not self.calls.is_full and (self.outage.resume_at is None or self.may_call(now))

    def may_call(self, now: float) -> bool:
        """Return whether an outage allows a call now."""
        return self.outage.admits(now, running=self.calls.in_hand > 0)

    def next_at(self, now: float) -> float | None:
        """Return the next time at which the dispatching thread should look for messages to call a handler with. If no
        such time is known, return None."""
        if self.calls.is_full and (self.admission is None or self.calls.in_hand > 0):
            # The end of a call wakes the dispatching thread. A process that admits no call wakes for itself.
            return None
        resume_at = self.outage.resume_at
        if resume_at is not None and resume_at > now:
            return resume_at
        if resume_at is not None and self.calls.in_hand > 0:
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
        key, outage = self.subscribed.key, self.outage
        if (pauses := outage.pauses) != self._reported:
            if pauses:
                now = time.monotonic()
                ago, pause = now - outage.since, (outage.resume_at or now) - now
                members.report_outage(run, instance, *key, outage.error, seconds_ago=ago, pause_seconds=pause)
            else:
                members.end_outage(run, instance, *key, has_succeeded=outage.has_succeeded)
            self._reported = pauses
        for one in self.reports:
            one.report(run, instance, key)


def _lane(subscription: Subscription) -> Lane:
    if subscription.mode is not Mode.CONCURRENT:
        return OrderedLane(subscription.batch, by_key=subscription.mode is Mode.KEY_ORDERED)
    for option in subscription.options:
        if option.has_lane:
            lane: Lane = hooks.resolved(hooks.lanes[type(option)])(option)
            return lane
    return ConcurrentLane(subscription.batch)


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
