"""The threads that call a subscription's handler, and one call in such a thread."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from typing import Any, Final, TypeAlias

from outbox import passing_over, tracing
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
from outbox.broker.consumer.owned_queue import OwnedQueue, Subscribed
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.consumer.shared_calls import SharedCalls, Sharing, may_join
from outbox.broker.consumer.work import NOT_STARTED, FetchedEntry, HandlerCall, Result, TimedOut
from outbox.codec import OWN_CONTENT_TYPES, Codecs
from outbox.errors import HandlerNotStarted, OutboxError, UndecodableBody
from outbox.message import Delivery
from outbox.ports import (
    AnyHandler,
    ClaimedElsewhere,
    ClaimingInvoker,
    Disposition,
    Invoker,
    RunAlone,
    SharingInvoker,
)
from outbox.subscription import Subscription, threads_of
from outbox.utils import faults, fence, log_context, measures
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)


# -- threads ---------------------------------------------------------------------------------------


# For each thread, up to this number of further calls wait in the pool. So a thread that has finished a call gets the
# next call at once.
_AHEAD_SINGLE: Final = 3
_AHEAD_BATCH: Final = 1
# Of calls that share transactions, a thread takes several at once.
_AHEAD_SHARED: Final = 7


# Runs a call in a thread of the pool (see `Caller.run`).
RunCall: TypeAlias = "Callable[[HandlerCall, WorkerPool], None]"
# If calls may share a transaction, at most this number of calls per busy thread wait until a busy thread takes them
# into its transaction. Further calls go to other threads.
_BEHIND: Final = 4
# If the busy threads take no waiting call for this time (seconds), the calls that wait for them go to other threads.
_BEHIND_SECONDS: Final = 0.02
# A pool with N threads replaces at most N times this number of stuck threads.
STUCK_LIMIT: Final = 4
# If a thread has no call for this time (seconds), it ends and closes its database connections.
IDLE_SECONDS: Final = 30.0


class _Thread:
    """A handler thread while it is idle: it waits to acquire `woken`, and then runs `task`. None: it ends."""

    __slots__ = ("task", "woken")

    def __init__(self) -> None:
        self.task: tuple[WorkerPool, HandlerCall] | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class HandlerThreads:
    """At most `most` threads, which run the calls of all subscriptions of a process (pools) in turn.

    A thread belongs to no subscription. It keeps its database connections when it goes on to the next subscription, so
    a process with many subscriptions has as many sessions as threads. The threads start when needed and end when idle.
    The thread that became idle last gets the next call, so after a burst the other threads end with their sessions.

    A subscription that has no thread gets the next free one. The last quarter of the threads is reserved for such
    subscriptions: the slow handlers of one subscription cannot stop all others.

    A waiting call is given to a thread in three places only: `staff`, when something has changed for its pool;
    `_next`, when a thread has finished a call of the same pool and no other pool waits; and `WorkerPool.take`, by which
    a call joins the transaction of a busy thread.

    The dispatching thread runs no call itself. In a trial, it ran each lone call of a short handler. This saved three
    of eight thread switches and up to 10 % of the CPU per message, but the tick and the fetch of the next message then
    waited for the COMMIT of the handler, and another thread would have to take over when a handler suddenly lasts.
    """

    def __init__(self, subscriptions: Sequence[Subscription], most: int | None = None) -> None:
        """`most`: None if each subscription has its own number of threads, whatever the others have."""
        wanted = sum(one.threads for one in subscriptions)
        self._most: Final = wanted if most is None else threads_of(subscriptions, most)
        self._reserved: Final = max(1, self._most // 4) if self._most < wanted and self._most > 1 else 0
        # The lock for all attributes below, and for those of the pools that several threads change.
        self.lock: Final = threading.Lock()
        # The thread that became idle last is the last one here.
        self._idle: list[_Thread] = []
        # The pools with calls that wait for a thread, first come first served. A pool whose calls all wait for its busy
        # threads, to join their transactions, is not here.
        self.waiting: Final[dict[WorkerPool, None]] = {}
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
                self._end(self._idle.pop())
        deadline = time.monotonic() + within_seconds
        for thread in started:
            thread.join(0.1 if are_stuck else max(0.0, deadline - time.monotonic()))

    def staff(self, pool: WorkerPool) -> None:
        """Let threads take the calls of this pool, and of the pools that wait already. The caller has the lock."""
        if pool.calls:
            self.waiting.setdefault(pool)
        while (self._idle or self._alive < self._most) and not self._is_stopped:
            first = next(filter(self._admits, self.waiting), None)
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

    def replace_stuck(self, pool: WorkerPool) -> None:
        """Replace the thread of an abandoned call of this pool. It ends as soon as its call returns."""
        self._alive -= 1
        self._busy -= 1
        pool.serving -= 1
        self.staff(pool)

    def _admits(self, pool: WorkerPool) -> bool:
        is_free = not pool.serving or self._busy < self._most - self._reserved
        return is_free and pool.has_free_thread

    def _begin(self, pool: WorkerPool) -> HandlerCall:
        work = pool.take_first()
        if pool in self.waiting:
            # The other pools that wait come first.
            self.waiting.pop(pool)
            self.waiting[pool] = None
        pool.serving += 1
        self._busy += 1
        return work

    def _start(self) -> _Thread:
        idle = _Thread()
        thread = threading.Thread(target=self._loop, args=[idle, next(self._numbers)], daemon=True)
        thread.start()
        self._alive += 1
        self._started = [*(known for known in self._started if known.is_alive()), thread]
        return idle

    def _end(self, thread: _Thread) -> None:
        self._alive -= 1
        thread.woken.release()

    def _loop(self, thread: _Thread, number: int) -> None:
        task: tuple[WorkerPool, HandlerCall] | None = None
        served: WorkerPool | None = None
        while (task := task or self._wait(thread)) is not None:
            pool, work = task
            if pool is not served:
                threading.current_thread().name = f"{pool.name}-{number}"
                served = pool
            pool.run(work, pool)
            if work.is_given_up:
                # Another thread has replaced this one.
                return
            task = self._next(pool, thread)

    def _next(self, pool: WorkerPool, thread: _Thread) -> tuple[WorkerPool, HandlerCall] | None:
        """Return the next call for the thread that has run a call of this pool. If there is none, or another pool
        waits, this thread is idle from now on, and None is returned."""
        with self.lock:
            self._busy -= 1
            pool.serving -= 1
            if self._is_stopped:
                self._end(thread)
            elif pool.calls and not self.waiting and self._admits(pool):
                return pool, self._begin(pool)
            else:
                # This thread is the first one to be woken, if a call waits.
                self._idle.append(thread)
                self.staff(pool)
            return None

    def _wait(self, thread: _Thread) -> tuple[WorkerPool, HandlerCall] | None:
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


class WorkerPool:
    """The calls of one subscription, of which up to `threads` run at the same time, in the threads of the process.

    Only the dispatching thread uses this class, apart from `take` and `waiting`. An admission may lower the number of
    calls that run at the same time with `allow`.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        run: RunCall,
        *,
        shared_threads: HandlerThreads,
        batches: bool,
        sharing: Sharing | None = None,
    ) -> None:
        self.name: Final = name
        self._threads = threads
        self.shared_threads: Final = shared_threads
        self.run: Final = run
        self.sharing: Final = sharing
        self._ahead = _AHEAD_BATCH if batches else _AHEAD_SINGLE
        # The number of submitted calls that have not ended.
        self.in_hand = 0
        # At most this number of calls may run; None: as many as there are threads. `usable_threads`: the lower of the
        # two.
        self._allowed: int | None = None
        self.usable_threads = threads
        # The lock of `shared_threads` protects these. `calls`: the calls that no thread has taken. `serving`: how many
        # threads run calls, without those of abandoned calls. `stuck`: the number of threads whose call was
        # abandoned and has not returned. `_taken_at`: the time (time.monotonic) at which a thread last took a call, or
        # at which a call was added to the empty `calls`.
        self.calls: Final[deque[HandlerCall]] = deque()
        self.serving = 0
        self.stuck = 0
        self._taken_at = 0.0

    @property
    def room(self) -> int:
        """The number of calls that the pool accepts now."""
        if self.stuck and self.frozen:
            return 0
        ahead = _AHEAD_SHARED if self.sharing is not None and self.sharing.allowed else self._ahead
        return max(0, self.usable_threads * (1 + ahead) - self.in_hand)

    @property
    def is_full(self) -> bool:
        """Whether the pool accepts no more calls now."""
        # With fewer calls than threads, there is room, unless the pool is frozen.
        return (self.stuck > 0 or self.in_hand >= self.usable_threads) and self.room == 0

    @property
    def frozen(self) -> bool:
        """Whether so many handlers are stuck that the pool starts no more calls."""
        return self.stuck > self._threads * STUCK_LIMIT

    @property
    def waiting(self) -> int:
        """The number of calls that no thread has taken yet. Any thread may read this property."""
        return len(self.calls)

    @property
    def running(self) -> int:
        """The number of calls that threads run, with abandoned calls whose handlers still run."""
        return self.serving + self.stuck

    @property
    def waiting_for_admission(self) -> int:
        """The number of calls that wait because no more calls are allowed to run."""
        return len(self.calls) if self._allowed is not None and self.running >= self._allowed else 0

    @property
    def has_free_thread(self) -> bool:
        """Whether another call may run now."""
        is_allowed = self._allowed is None or self.running < self._allowed
        return is_allowed and self.serving < self._threads and not (self.stuck and self.frozen)

    def submit(self, work: HandlerCall) -> None:
        """Run a call as soon as a thread is free."""
        self.in_hand += 1
        self.start(work)

    def reserve(self) -> None:
        """Count a call as submitted.

        After `reserve`, the pool's user calls `start`, or only `collected` if the call is refused.
        """
        self.in_hand += 1

    def start(self, work: HandlerCall) -> None:
        """Run a call that `reserve` has counted. If it may join the transaction of a busy thread, it waits for that."""
        sharing = self.sharing
        with self.shared_threads.lock:
            if not self.calls:
                self._taken_at = time.monotonic()
            waits = len(self.calls) < _BEHIND * self.serving and sharing is not None and sharing.allowed
            self.calls.append(work)
            if not (waits and may_join(work)):
                self.shared_threads.staff(self)

    def take(self) -> HandlerCall | None:
        """Return a call that may join the transaction of the thread that asks, or None. Only a thread that runs a call
        of this pool uses this method."""
        with self.shared_threads.lock:
            return self.take_first() if self.calls and may_join(self.calls[0]) else None

    def take_first(self) -> HandlerCall:
        """Remove and return the first waiting call. The caller has the lock of the threads."""
        self._taken_at = time.monotonic()
        work = self.calls.popleft()
        if not self.calls:
            self.shared_threads.waiting.pop(self, None)
        return work

    def spread_at(self) -> float | None:
        """Return the time at which to call `spread`; None if no call waits for a busy thread, or if no other thread may
        run it."""
        waits = bool(self.calls) and self not in self.shared_threads.waiting
        return self._taken_at + _BEHIND_SECONDS if waits and self.has_free_thread else None

    def spread(self, now: float) -> None:
        """Give the calls that wait for busy threads to other threads, if the busy threads do not take them."""
        at = self.spread_at()
        if at is not None and now >= at:
            with self.shared_threads.lock:
                self.shared_threads.staff(self)

    @property
    def is_closed(self) -> bool:
        """Whether no call may start now, however many threads are free."""
        return self.frozen or self._allowed == 0

    def withdraw(self) -> list[HandlerCall]:
        """Remove and return the submitted calls that no thread has taken."""
        with self.shared_threads.lock:
            return [self.take_first() for _ in range(len(self.calls))]

    def allow(self, number: int | None) -> int:
        """Let at most this number of calls run at the same time; None: as many as there are threads.

        Return the number of calls that run now. If more calls run than allowed, they continue.
        """
        with self.shared_threads.lock:
            if number != self._allowed:
                self._allowed = number
                self.usable_threads = self._threads if number is None else min(self._threads, number)
                self.shared_threads.staff(self)
            return self.running

    def collected(self) -> None:
        """Record that a submitted call is over."""
        self.in_hand -= 1

    def replace_stuck(self) -> None:
        """Replace the thread of an abandoned call that still runs."""
        self.in_hand -= 1
        with self.shared_threads.lock:
            self.stuck += 1
            self.shared_threads.replace_stuck(self)
        if self.frozen:
            logger.error(
                "%s: %d handlers are stuck; outbox starts no more threads for this subscription",
                self.name,
                self.stuck,
            )

    def unstuck(self) -> None:
        """Record that an abandoned call has returned. The thread of this call ends."""
        with self.shared_threads.lock:
            self.stuck -= 1
            self.shared_threads.staff(self)


# -- one call --------------------------------------------------------------------------------------
#
# A thread of the pool calls the handler with decoded bodies, inside a fence. An error becomes the result of its
# message.


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
        self._finished = finished
        self._running = running
        # A decoding thread holds the interpreter lock all the time. With `_decoding`, only one thread decodes at a
        # time. If several threads decoded, the dispatching thread would wait one switch interval for each of these
        # threads.
        self._decoding = threading.Lock()

    def run(self, work: HandlerCall, pool: WorkerPool) -> None:
        """Call the handler for the messages of this call that may be started now.

        If calls wait for a busy thread of the pool, this method also runs some of them, in the same transaction.
        """
        sharing = pool.sharing
        if sharing is not None and pool.calls and sharing.allowed and may_join(work):
            take, deliver = pool.take, self._deliver_joined
            shared = SharedCalls(
                work, sharing, take=take, deliver=deliver, running=self._joined, finished=self._finished
            )
            self._run_shared(shared, sharing)
            return
        self._run_alone(work, sharing)
        self._finished(work)

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
        if any(result is RunAlone.RUN_ALONE for result in results):
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
            self._finished(work)

    def _call(self, work: HandlerCall, sharing: Sharing | None, shared: SharedCalls | None = None) -> list[Any]:
        """Return the results of the call, followed by the results of the calls that have joined its transaction."""
        work.start()
        faults.point("consumer.before_handler")
        results: list[Any] = [NOT_STARTED] * len(work.items)
        with self._decoding:
            deliveries, places = self._deliveries(work, results)
        if not deliveries:
            return results
        fence_reason = work.fence_reason if shared is None else shared.fence_reason
        with fence.attempt(fence_reason), self._observed(work, deliveries, places) as observed:
            outcomes: Sequence[Any]
            claim = self._claim if work.subscribed.claims else None
            if claim is not None:
                outcomes = self._invoke_claiming(claim, work, deliveries, work.subscribed.handler)
            else:
                outcomes = self._invoke(work.subscribed, deliveries, sharing, shared)
            if shared is None and isinstance(outcomes[0], Exception) and passing_over.is_to_pass(deliveries, outcomes):
                outcomes = self._pass_over(claim, work, deliveries, outcomes[0])
            observed += outcomes[: len(deliveries)]
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

    def _invoke(
        self,
        subscribed: Subscribed,
        deliveries: Sequence[Delivery],
        sharing: Sharing | None,
        shared: SharedCalls | None,
    ) -> Sequence[Disposition | Exception | RunAlone]:
        subscription = subscribed.subscription
        handler = subscribed.handler if sharing is None else sharing.timed(subscribed.handler)
        if shared is None or self._share is None:
            return self._invoker(subscription, handler, deliveries, generation=subscribed.group.generation)
        [delivery] = deliveries
        return self._share(subscription, handler, delivery, shared, generation=shared.generation)

    def _deliver_joined(self, work: HandlerCall) -> Delivery | None:
        results: list[Result] = [NOT_STARTED]
        try:
            with self._decoding:
                deliveries, _ = self._deliveries(work, results)
        except BaseException as error:
            logger.error(
                "decoding a message of group %r failed", work.subscribed.subscription.group, exc_info=printable(error)
            )
            deliveries, results = [], [error]
        if deliveries:
            return deliveries[0]
        work.results = _contained(work, results)
        return None

    @contextlib.contextmanager
    def _joined(self, previous: HandlerCall, work: HandlerCall, delivery: Delivery) -> Iterator[None]:
        """The context in which the handler runs for `work`, a call that has joined the transaction of `previous`."""
        self._forget(previous)
        faults.point("consumer.before_handler")
        with self._observed(work, [delivery], [0]) as outcomes:
            try:
                yield
            except Exception as error:
                outcomes.append(error)
                raise
            outcomes.append(Disposition.HANDLED)

    @contextlib.contextmanager
    def _observed(
        self, work: HandlerCall, deliveries: Sequence[Delivery], places: Sequence[int]
    ) -> Iterator[list[object]]:
        """Write a note, a trace and the measured time of a handler call. The caller appends the outcomes to the yielded
        list."""
        recorder = measures.recorder
        started = time.time() if recorder is not None else 0.0
        outcomes: list[object] = []
        with log_context.handling(deliveries), tracing.handling(deliveries) as conclude:
            self._note(work, places)
            try:
                yield outcomes
            finally:
                self._forget(work)
            conclude(outcomes)
        if recorder is not None:
            subscription = work.subscribed.subscription
            # For a claimed message, only the claim tells whether an attempt begins after the time limit.
            failures = [one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, TimedOut)]
            took = (work.returned_at or time.time()) - started
            waits, count = _waits(deliveries, started), len(deliveries)
            recorder.handled(subscription.group, subscription.topic, waits, took, count=count, failures=failures)

    def _note(self, work: HandlerCall, places: Sequence[int]) -> None:
        """Write a note of the call into the file that the parent of this process reads."""
        if self._running is not None:
            log_ids = [row[LOG_ID] for place in places if (row := work.items[place].row) is not None]
            work.note = self._running.note(work.subscribed.group.group_id, log_ids, alone=work.alone)

    def _forget(self, work: HandlerCall) -> None:
        if self._running is not None and work.note is not None:
            self._running.forget(work.note)
            work.note = None

    def _deliveries(self, work: HandlerCall, results: list[Result]) -> tuple[list[Delivery], list[int]]:
        """Return the deliveries and their places in the call.

        If a body cannot be decoded, or the key of its subject cannot be read now, the error becomes the result of the
        message. If the time limit of a message is over, the result of the message is TimedOut. If only newer code can
        read the message, the result is NeedsNewerCode.
        """
        group, topic = work.subscribed.group.name, work.subscribed.subscription.topic
        decode, reader = self._codecs.decode, work.subscribed.subscription.reader
        decode_again = work.subscribed.subscription.decoder(decode)
        # Check the leases after the fault point. If a test freezes the process at the fault point, no handler starts
        # with an expired lease.
        lease = work.subscribed.admission_lease
        is_admitted = lease is None or lease.admits(work.admission_epoch)
        claims = self._claim is not None and work.subscribed.claims
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
