"""Lets the handler calls of one thread share a transaction, so that several messages cost one COMMIT.

The invoker decides about the transaction (contrib/django/subscribers/shared_transaction.py). This module gives the
invoker further waiting calls. The calls share only the transaction: each call has its own time limit, note, log
context, span and result.

See decision 198.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from outbox.broker.consumer.work import NOT_STARTED, HandlerCall
from outbox.message import Delivery
from outbox.ports import AnyHandler
from outbox.utils.backoff import Backoff

logger = logging.getLogger(__name__)

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
        """Return a handler that calls `handler` and records its time.

        The time of COMMIT does not count: on a slow disk, each COMMIT may take longer than SHORT_SECONDS, and sharing
        then saves the most.
        """

        def call(given: Any) -> Any:
            started = time.monotonic()
            try:
                return handler(given)
            finally:
                self.took(time.monotonic() - started)

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

    `take` returns the next waiting call that may join, or None. `deliver` returns the delivery of a call; if the
    handler cannot be called, `deliver` stores the result and returns None. `running` is a context
    manager around the handler call (parameters: the previous call, the call, the delivery). `finished` gets a call that
    has ended. Only the thread of the first call uses this object.
    """

    def __init__(
        self,
        first: HandlerCall,
        sharing: Sharing,
        *,
        take: Callable[[], HandlerCall | None],
        deliver: Callable[[HandlerCall], Delivery | None],
        running: Callable[[HandlerCall, HandlerCall, Delivery], AbstractContextManager[None]],
        finished: Callable[[HandlerCall], None],
    ) -> None:
        self.calls = [first]
        # The inbox generation of all messages of the transaction.
        self.generation: Final = first.subscribed.group.generation
        # The call whose handler has run last. It is not always the call before the newest one: a skipped message has
        # joined too, but its handler does not run.
        self._ran_last = first
        self._sharing = sharing
        self._take = take
        self._deliver = deliver
        self._running = running
        self._finished = finished
        self._closes_at = time.monotonic() + _OPEN_SECONDS
        first.shares = self.calls

    def next(self) -> Delivery | None:
        """Return the message of a further call for this transaction; None if the transaction should end now."""
        while self._is_open() and (work := self._take()) is not None:
            # An operator may have raised the generation since the transaction began. The inbox must not skip this
            # message because of a row of the earlier generation.
            is_of_same = work.subscribed.group.generation == self.generation
            delivery = self._deliver(work) if is_of_same else None
            if delivery is not None:
                work.shares = self.calls
                self.calls.append(work)
                return delivery
            if not is_of_same:
                work.results = [NOT_STARTED]
            self._finished(work)
        return None

    def _is_open(self) -> bool:
        return (
            len(self.calls) < self._sharing.most
            and self._sharing.allowed
            and time.monotonic() < self._closes_at
            and not self.calls[0].is_given_up
        )

    @contextmanager
    def running(self, delivery: Delivery) -> Iterator[None]:
        """A context manager around the handler call for the delivery that `next` has returned last."""
        previous, work = self._ran_last, self.calls[-1]
        self._ran_last = work
        # The handler of the previous call has returned, so its time limit ends here. The limit of the last call also
        # covers COMMIT.
        previous.started_at = None
        previous.returned_at = time.time()
        work.start()
        with self._running(previous, work, delivery):
            yield

    def finishing(self, number: int) -> None:
        """From now on, the time limit of the call with this number (0: the first) applies, and no other limit.

        The invoker calls this method before it runs the on_commit callbacks of that call.
        """
        for place, call in enumerate(self.calls):
            if place != number:
                call.started_at = None
        self.calls[number].start()

    def end_sharing(self, reason: str) -> None:
        """From now on, each call of this subscription commits alone, until the process ends."""
        if self._sharing.end():
            subscription = self.calls[0].subscribed.subscription
            logger.info(
                "group %s: each message of %s commits alone: %s", subscription.group, subscription.topic, reason
            )

    def fence_reason(self) -> str:
        """Return why the effects of these calls must not be stored; '' if they may be stored."""
        return next((reason for call in self.calls if (reason := call.fence_reason())), "")


def may_join(work: HandlerCall) -> bool:
    """Whether a call may share a transaction. A message that is in quarantine or has failed before runs alone."""
    return work.may_share and work.items[0].attempt == 1
