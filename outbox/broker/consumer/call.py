"""One call of a handler: what the process knows about it, which calls share its transaction, and how a thread runs it.

A handler thread runs `Caller.run`. Short handlers of one thread share a transaction, so that several messages cost one
COMMIT (decision 198): the invoker decides about the transaction (contrib/django/subscribers/shared_transaction.py), and
`SharedCalls` gives it further waiting calls. The calls share only the transaction: each call has its own time limit,
note, log context, span and result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass
from types import TracebackType
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
from outbox.broker.consumer.lanes import FetchedEntry, Lane
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.groups.redelivery import Redelivery
from outbox.codec import OWN_CONTENT_TYPES, Codecs
from outbox.errors import HandlerNotStarted, OutboxError, UndecodableBody
from outbox.message import Delivery, Message
from outbox.ports import (
    AnyHandler,
    ClaimedElsewhere,
    ClaimingInvoker,
    Disposition,
    Invoker,
    RunAlone,
    SharingInvoker,
)
from outbox.utils import faults, fence, log_context, measures
from outbox.utils.backoff import Backoff
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)


# -- a call and its results ------------------------------------------------------------------------


NOT_STARTED = None
"""The result of a delivery whose handler was not called, because its queue was lost or is being handed over."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The result of a delivery whose handler must wait until the time `until` (time.monotonic)."""

    until: float


class TimedOut(Exception):
    """The result of a delivery whose handler was not called, because the time limit of the message was over."""


Result = Disposition | BaseException | Postponed | ClaimedElsewhere | None

# A claimed message leaves its queue if its handler runs for longer than this (seconds). A shorter call needs no
# redelivery.
LEAVE_SECONDS: Final = 1.0


class HandlerCall:
    """One call of a handler: its items and, after the call, a result for each item."""

    __slots__ = (
        "abandoned",
        "admission_epoch",
        "alone",
        "claimed_at",
        "commits",
        "expired",
        "given_back",
        "has_left",
        "items",
        "lane",
        "may_share",
        "note",
        "redelivery",
        "renew_at",
        "results",
        "returned_at",
        "shares",
        "started_at",
        "subscribed",
        "term_seconds",
    )

    def __init__(self, subscribed: Subscribed, lane: Lane, items: list[FetchedEntry]) -> None:
        self.subscribed = subscribed
        self.lane = lane
        self.items = items
        # The epoch in which this call was admitted (AdmissionLease).
        self.admission_epoch = 0 if subscribed.admission_lease is None else subscribed.admission_lease.epoch
        # Items of this call that retention removed before the process could load them.
        self.expired: list[FetchedEntry] = []
        self.results: Sequence[Result] = ()
        # Whether this call handles a quarantined message while this process runs no other call.
        self.alone = False
        self.started_at: float | None = None
        # The reason why the attempt no longer counts; '' while the attempt counts. The dispatching thread sets this
        # text, and the handler's thread reads it.
        self.abandoned = ""
        # Whether the transaction of this call may have committed. The handler's thread sets it before it reads
        # `abandoned`, and the dispatching thread reads it after it has set `abandoned`.
        self.commits = False
        # The time (time.time) at which the handler returned, if another call then joined its transaction; else None.
        self.returned_at: float | None = None
        # The place of this call's note about the running handler (RunningCalls); None without a note.
        self.note: int | None = None
        # Whether this call may share a transaction with other calls of its subscription.
        self.may_share = False
        # The calls of the shared transaction, this one included; None if this call runs alone.
        self.shares: SharedCalls | None = None
        # Whether this call was ended because another call of its shared transaction timed out. Its late result is
        # ignored.
        self.given_back = False
        # The time (time.monotonic) at which the message of this call was claimed, and the term of the claim. The
        # handler's thread sets the time last.
        self.claimed_at: float | None = None
        self.term_seconds = 0.0
        # Whether the queue does not wait for this call any more: the claimed message has left its queue, or it is
        # detached from its queue. `redelivery`: the row that delivers the message again. It is None if the message is
        # detached: then the next owner of the queue delivers the message again.
        self.has_left = False
        self.redelivery: Redelivery | None = None
        # The time (time.monotonic) at which to move the due time of that row.
        self.renew_at = 0.0

    def claimed(self, term_seconds: float) -> None:
        """Record that the message of this call is claimed. The handler's thread calls this method."""
        self.term_seconds = term_seconds
        self.claimed_at = time.monotonic()

    @property
    def keeps_order(self) -> bool:
        """Whether the messages of this call block the later messages of their keys.

        A message of the retry queue has given up its order, and blocks no message.
        """
        return self.subscribed.ordered and any(item.queue.subscribed is not None for item in self.items)

    def leaves_at(self) -> float | None:
        """Return when the queue stops waiting for the claimed message (time.monotonic).

        In concurrent mode, the message leaves its queue. In ordered modes, the message blocks the later messages of its
        key, so it stays in its queue as long as this process owns the queue; it is detached when the queue is handed
        over or lost. Return None if the message has left, or stays.
        """
        if self.claimed_at is None or self.has_left:
            return None
        phases = {item.queue.phase for item in self.items}
        if self.keeps_order:
            return self.claimed_at if phases & {Phase.DRAINING, Phase.LOST} else None
        return self.claimed_at + (LEAVE_SECONDS if phases == {Phase.ACTIVE} else 0.0)

    @property
    def blocks_until_returned(self) -> bool:
        """Whether the handler of this abandoned call still runs, and its key or queue must wait for it."""
        by_key = self.subscribed.ordered or self.subscribed.waits_for_key
        return bool(self.abandoned) and not self.given_back and by_key

    @property
    def is_given_up(self) -> bool:
        """Whether the thread of this call was replaced: this call, or a call that shares its transaction, hangs."""
        return bool(self.abandoned) or (self.shares is not None and self.shares.is_given_up)

    def committing(self, commits: bool) -> None:
        """Record whether the transaction may have committed. The handler's thread calls this (outbox.utils.fence)."""
        self.commits = commits

    def fence_reason(self) -> str:
        """Return why the effects of this attempt must not be stored (outbox.utils.fence); '' if they may be stored."""
        if self.abandoned or self.claimed_at is not None:
            # The token of a claim protects the effects of a claimed message, whether the queue is lost or not.
            return self.abandoned
        trusted: OwnedQueue | None = None
        for item in self.items:
            queue = item.queue
            if queue is not trusted and not queue.trusted():
                return f"the lease of queue {queue.name} for group {queue.group.name!r} is over"
            trusted = queue
        return ""


# -- calls that share a transaction ----------------------------------------------------------------


# If the handlers of a subscription take longer than this on average (seconds), each of them commits alone. Otherwise,
# the locks of a finished handler would be held for the time of the handlers after it.
SHORT_SECONDS: Final = 0.01
# No call joins a transaction that is older than this (seconds).
_OPEN_SECONDS: Final = 0.02
# The weight of the newest call in the average time.
_NEWEST: Final = 0.2
# After a shared transaction that failed, each call commits alone for a while.
_PAUSES: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)


class Sharing:
    """Whether the calls of one subscription may share transactions now. Any thread of the process may use this object.

    `most`: at most this number of calls shares a transaction.
    """

    def __init__(self, most: int) -> None:
        self.most: Final = most
        self._average: float | None = None
        self._timed: AnyHandler | None = None
        self._failures = 0
        self._not_before = 0.0
        self._is_over = most < 2
        self._lock = threading.Lock()

    @property
    def allowed(self) -> bool:
        """Whether the handlers are short, and no shared transaction has failed recently."""
        return (
            not self._is_over
            and self._average is not None
            and self._average <= SHORT_SECONDS
            and time.monotonic() >= self._not_before
        )

    def timed(self, handler: AnyHandler) -> AnyHandler:
        """Return a handler that calls `handler` and records its time. All calls of a subscription have one handler.

        The time of COMMIT does not count: on a slow disk, each COMMIT may take longer than SHORT_SECONDS, and sharing
        then saves the most.
        """

        if self._timed is not None:
            return self._timed

        def call(given: Any) -> Any:
            started = time.monotonic()
            try:
                return handler(given)
            finally:
                self.took(time.monotonic() - started)

        self._timed = call
        return call

    def took(self, seconds: float) -> None:
        """Record the time of a handler call."""
        average = self._average
        self._average = seconds if average is None else average + _NEWEST * (seconds - average)

    def worked(self) -> None:
        """Record that calls have committed together."""
        if self._failures:
            with self._lock:
                self._failures -= 1

    def failed(self) -> None:
        """Record that a shared transaction could not commit all its calls. The next calls commit alone for a while."""
        with self._lock:
            self._failures += 1
            self._not_before = time.monotonic() + _PAUSES.pause_seconds(self._failures)

    def end(self) -> bool:
        """From now on, each call commits alone, until the process ends. Return False if `end` was called before."""
        was_over, self._is_over = self._is_over, True
        return not was_over


class SharedCalls:
    """The calls that share the transaction of their first call. This class implements `ports.MoreCalls`.

    `take` returns the next waiting call that may join, or None. Only the thread of the first call uses this object.
    """

    def __init__(
        self,
        first: HandlerCall,
        sharing: Sharing,
        take: Callable[[], HandlerCall | None],
        caller: Caller,
    ) -> None:
        self.calls = [first]
        # The inbox generation of all messages of the transaction.
        self.generation: Final = first.subscribed.group.generation
        # The call whose handler has run last. It is not always the call before the newest one: a skipped message has
        # joined too, but its handler does not run.
        self._ran_last = first
        self._sharing = sharing
        self._take = take
        self._caller = caller
        self._closes_at = time.monotonic() + _OPEN_SECONDS
        # Whether another thread has replaced the one of these calls, because a handler hangs. The dispatching thread
        # sets it.
        self.is_given_up = False
        first.shares = self

    def next(self) -> Delivery | None:
        """Return the message of a further call for this transaction; None if the transaction should end now."""
        while self._is_open() and (work := self._take()) is not None:
            # An operator may have raised the generation since the transaction began. The inbox must not skip this
            # message because of a row of the earlier generation.
            is_of_same = work.subscribed.group.generation == self.generation
            delivery = self._caller.deliver_joined(work) if is_of_same else None
            if delivery is not None:
                work.shares = self
                self.calls.append(work)
                return delivery
            if not is_of_same:
                work.results = [NOT_STARTED]
            self._caller.finished(work)
        return None

    def _is_open(self) -> bool:
        return (
            len(self.calls) < self._sharing.most
            and self._sharing.allowed
            and time.monotonic() < self._closes_at
            and not self.is_given_up
        )

    def running(self, delivery: Delivery) -> AbstractContextManager[object]:
        """A context manager around the handler call for the delivery that `next` has returned last."""
        previous, work = self._ran_last, self.calls[-1]
        self._ran_last = work
        # The handler of the previous call has returned, so its time limit ends here. The limit of the last call also
        # covers COMMIT.
        previous.started_at = None
        previous.returned_at = time.time()
        work.started_at = time.monotonic()
        return self._caller.joined(previous, work, delivery)

    def finishing(self, number: int) -> None:
        """From now on, the time limit of the call with this number (0: the first) applies, and no other limit.

        The invoker calls this method before it runs the on_commit callbacks of that call.
        """
        for place, call in enumerate(self.calls):
            if place != number:
                call.started_at = None
        self.calls[number].started_at = time.monotonic()

    def end_sharing(self, reason: str) -> None:
        """From now on, each call of this subscription commits alone, until the process ends."""
        if self._sharing.end():
            subscription = self.calls[0].subscribed.subscription
            logger.info(
                "group %s: each message of %s commits alone: %s", subscription.group, subscription.topic, reason
            )

    def committing(self, commits: bool) -> None:
        """Record whether the common transaction may have committed."""
        for call in self.calls:
            call.commits = commits

    def fence_reason(self) -> str:
        """Return why the effects of these calls must not be stored; '' if they may be stored."""
        for call in self.calls:
            if reason := call.fence_reason():
                return reason
        return ""


def may_join(work: HandlerCall) -> bool:
    """Whether a call may share a transaction. A message that is in quarantine or has failed before runs alone."""
    first = work.items[0]
    return work.may_share and not first.retries and not first.in_place


# -- a call in its thread --------------------------------------------------------------------------
#
# A handler thread calls the handler with decoded bodies, inside a fence. An error becomes the result of its message.


# A thread waits at most this time (seconds) until the others have decoded.
_TURN_SECONDS: Final = 0.05

# Runs a call in a handler thread (see `Caller.run`).
RunCall: TypeAlias = Callable[[HandlerCall, Sharing | None, Callable[[], HandlerCall | None] | None], None]


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
