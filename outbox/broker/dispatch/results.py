"""Book a finished call: finished messages, failed ones, and those that stay here as if never tried.

The failure of a batch does not show which message caused it. The batch is halved, and its halves are called again,
until the message is alone. Only then an attempt has failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox.broker.dispatch.failures import Failed
from outbox.broker.dispatch.outage import Outage
from outbox.broker.dispatch.owned_queue import EntryOutcome, OwnedQueue, Phase
from outbox.broker.dispatch.work import FetchedEntry, HandlerCall, Postponed, Result, divide
from outbox.broker.groups.send_back import describe
from outbox.errors import HandlerNotStarted, KillsItsProcess, LeaseLost, RetryLater, ServiceUnavailable, UndecodableBody
from outbox.ports import Disposition
from outbox.subscription import OnError, Subscription

logger = logging.getLogger(__name__)

_OUTCOMES: Final = {Disposition.HANDLED: EntryOutcome.HANDLED, Disposition.SKIPPED: EntryOutcome.SKIPPED}


@dataclass
class CallOutcome:
    """The work that a call leaves. `again`: ids of items to be handed out here again, attempts unused.

    `lost`: queues whose lease was found to be over.
    """

    failed: list[Failed] = field(default_factory=list)
    again: set[int] = field(default_factory=set)
    lost: list[OwnedQueue] = field(default_factory=list)


def book(work: HandlerCall, results: Sequence[Result], outage: Outage) -> CallOutcome:
    """Mark handled messages as finished in their window, and sort the rest."""
    booked = CallOutcome()
    errors: list[tuple[FetchedEntry, BaseException]] = []
    for item, result in zip(work.items, results, strict=True):
        queue = item.queue
        if queue.phase is Phase.LOST or queue in booked.lost:
            # The next owner delivers it again, so this process records neither success nor failure.
            continue
        if isinstance(result, Disposition):
            queue.window.finish(item.offset, _OUTCOMES[result])
        elif isinstance(result, BaseException):
            errors.append((item, result))
        elif isinstance(result, Postponed) or queue.trusted():
            # Not started, perhaps because the lease was unsure for a moment and was renewed since: back to its place.
            _keep(item, result.until if isinstance(result, Postponed) else 0.0, booked)
        elif queue.phase is not Phase.STOPPED:
            # Now, not at the next look: a renewal in between would leave a gap at this message.
            booked.lost.append(queue)
    if any(isinstance(result, Disposition) for result in results):
        outage.succeeded(time.monotonic())
        booked.failed += [Failed(work.subscribed, item, error) for item, error in errors]
    elif errors:
        _book_failure(work, errors, outage, booked)
    return booked


def _book_failure(
    work: HandlerCall, errors: Sequence[tuple[FetchedEntry, BaseException]], outage: Outage, booked: CallOutcome
) -> None:
    """Book a failed call whose messages all failed; decide which message caused it, if that is known."""
    undecodable = [Failed(work.subscribed, item, error) for item, error in errors if isinstance(error, UndecodableBody)]
    booked.failed += undecodable
    called = [(item, error) for item, error in errors if not isinstance(error, UndecodableBody)]
    if not called:
        return
    items, error = [item for item, _ in called], called[0][1]
    if any(other is not error for _, other in called) or isinstance(error, (LeaseLost, KillsItsProcess)):
        # The handler named the cause for each message, or the fence stopped the call.
        booked.failed += [Failed(work.subscribed, item, other) for item, other in called]
        return
    until = _outage(work, items, error, outage)
    if until is not None:
        for item in items:
            _keep(item, until, booked)
    elif len(items) == 1:
        booked.failed.append(Failed(work.subscribed, items[0], error))
    else:
        logger.warning(
            "group %s: a batch of %d messages failed; it is halved to find out which one it is: %s",
            work.subscribed.group.name,
            len(items),
            describe(error),
        )
        divide(items, (len(items) + 1) // 2)
        for item in items:
            _keep(item, 0.0, booked)


def _outage(work: HandlerCall, items: Sequence[FetchedEntry], error: BaseException, outage: Outage) -> float | None:
    now = time.monotonic()
    text = describe(error)
    if isinstance(error, HandlerNotStarted):
        until: float | None = outage.not_started(text, now)
    elif isinstance(error, ServiceUnavailable):
        until = outage.not_started(text, now, error.pause_seconds)
    elif _is_unexplained(work.subscribed.subscription, error):
        until = outage.failed([(item.queue.key, item.offset) for item in items], text, now)
    else:
        return None
    if until is not None:
        logger.warning(
            "group %s: %d messages of %s wait %.1f s, attempts uncounted, because a service seems to be down: %s",
            work.subscribed.group.name,
            len(items),
            work.subscribed.subscription.topic,
            until - now,
            text,
        )
    return until


def _is_unexplained(subscription: Subscription, error: BaseException) -> bool:
    """Whether the error may mean that a service is down: neither handler nor subscription has classified it.

    A database that refuses a row by a constraint has answered, so it is not down.
    """
    return (
        subscription.reaction(error) is OnError.RETRY
        and not isinstance(error, RetryLater)
        and not _violates_a_constraint(error)
    )


def _violates_a_constraint(error: BaseException) -> bool:
    """Whether it is an IntegrityError of a database driver (PEP 249 defines that name) or of Django."""
    return any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)


def _keep(item: FetchedEntry, due: float, booked: CallOutcome) -> None:
    if item.queue.phase is not Phase.STOPPED:
        # A stopped queue is fetched again when it is resumed.
        item.due = due
        booked.again.add(id(item))
