"""One call of a handler: what the process knows about it, and which calls share its transaction.

Short handlers of one thread share a transaction, so that several messages cost one COMMIT (decision 198): the invoker
decides about the transaction (contrib/django/subscribers/shared_transaction.py), and `SharedCalls` gives it further
waiting calls. The calls share only the transaction: each call has its own time limit, note, log context, span and
result. `Caller.run` in scheduler.py runs a call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from outbox.broker.consumer.lanes import FetchedEntry, Lane
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.groups.redelivery import Redelivery
from outbox.message import Delivery
from outbox.ports import AnyHandler, ClaimedElsewhere, Disposition
from outbox.utils.backoff import Backoff

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


class JoiningCaller(Protocol):
    """What `SharedCalls` needs of the `Caller` of its first call (scheduler.py)."""

    def finished(self, work: HandlerCall) -> None: ...

    def deliver_joined(self, work: HandlerCall) -> Delivery | None: ...

    def joined(
        self, previous: HandlerCall, work: HandlerCall, delivery: Delivery
    ) -> AbstractContextManager[object]: ...


class SharedCalls:
    """The calls that share the transaction of their first call. This class implements `ports.MoreCalls`.

    `take` returns the next waiting call that may join, or None. Only the thread of the first call uses this object.
    """

    def __init__(
        self,
        first: HandlerCall,
        sharing: Sharing,
        take: Callable[[], HandlerCall | None],
        caller: JoiningCaller,
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
