"""What the process has for one subscription: its lanes, its calls, its `Outage`, and what parts add to them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol
from uuid import UUID

from outbox import hooks
from outbox.broker.consumer.call import HandlerCall, Result, Sharing
from outbox.broker.consumer.lanes import ConcurrentLane, FetchedEntry, Lane, OrderedLane
from outbox.broker.consumer.owned_queue import Subscribed
from outbox.broker.consumer.results import Outage
from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.subscription import Mode, Subscription

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

    def __init__(self, subscribed: Subscribed, lock: threading.Lock, *, sharing_calls: int = 1) -> None:
        """`lock`: the one of the `Scheduler`."""
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
            lock,
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
