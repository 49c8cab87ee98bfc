"""Book the results of a finished call: a message is finished, its attempt has failed, or its attempt does not count.

The process decides what to do with each failed message, and records this decision at once. The process tries the
message again, sends it back, gives it up, or stops its queue.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import psycopg

from outbox.broker.consumer.call import HandlerCall, Postponed, Result, TimedOut
from outbox.broker.consumer.fetch import BORN_AT, KEY, LOG_ID, MESSAGE_ID, TRANSACTION_ID, Row
from outbox.broker.consumer.lanes import FetchedEntry, divide
from outbox.broker.consumer.owned_queue import ConsumingGroup, EntryOutcome, OwnedQueue, Phase, Subscribed
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.groups import leases, redelivery, registration, send_back
from outbox.broker.groups.redelivery import Redelivery
from outbox.broker.groups.send_back import Failure, FailureAction, FailurePlan, cause_of, describe
from outbox.errors import (
    HandlerNotStarted,
    KillsItsProcess,
    LeaseLost,
    NeedsNewerCode,
    OutboxError,
    RetryLater,
    ServiceUnavailable,
    UndecodableBody,
)
from outbox.ports import ClaimedElsewhere, Disposition
from outbox.retry import code_wait_seconds
from outbox.subscription import OnError, Subscription
from outbox.utils import faults, given_up, log_context
from outbox.utils.backoff import Backoff
from outbox.utils.refused_connections import is_refused
from outbox.utils.safe_text import class_name_of, printable

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
# Messages may also fail for a reason of their own: a trigger refuses a third of all orders. If the subscription then
# paused, the healthy messages would wait for nothing. So while its calls succeed, a failed call is weak evidence:
#
# - It is no sign of an outage if all its messages have failed before, or if it has several messages. A retried message
#   is a biased witness: it has failed before, and the retries of messages that fail alike come together, while a
#   success of another message says that the service works. A batch fails if one of its messages does.
# - If a success has ended a shorter series of the same error, three in a row may be chance: if a third of the messages
#   fail, such a series begins about once in forty messages. Then twenty in a row are an outage. Only a success of a
#   call that began after the first failure counts here: when a service goes down, calls that began before may still
#   succeed. If messages have at most two attempts, three in a row always suffice, because twenty would be dead letters.
#
# If no call has succeeded for a minute, or since the process began, every failed call is a sign, and three are enough.
# But retries stay without weight if a success has ever refuted their error: when no new messages arrive, the retries of
# the messages that a trigger refuses are all that is left.
#
# A few poison messages look like an outage if no other messages arrive. So an outage lasts at most as long as all retry
# delays of one message together. After this longest time, failures count as attempts again, so each message finally
# succeeds or is given up. An error whose text contains the message id is never the same as another one, so it
# is no outage.


_IN_A_ROW: Final = 3
# If every second message fails, such a series begins once in two million messages.
_IN_A_ROW_BY_CHANCE: Final = 20
# For this time (seconds), a success says that the service works, and an outage with the same error continues the last.
_RECENT_SECONDS: Final = 60.0
# The number of causes that an `Outage` remembers.
_KNOWN_CAUSES: Final = 16
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
        self._error = self._cause = ""
        # The messages of each failed call in the present series. All calls of the series failed with `_cause`, and no
        # two of them share a message.
        self._failed: list[frozenset[Hashable]] = []
        self._pauses = 0
        self._began = 0.0
        # The time of the first failure with `_cause`.
        self.since = 0.0
        self._is_over_time = False
        # Whether a handler has requested the length of the current pause.
        self._asked = False
        self.resume_at: float | None = None
        # Whether a call has succeeded since the last outage began. An outage may also end without: at its longest time.
        self.has_succeeded = False
        # The time of the last success; None before the first one.
        self._succeeded_at: float | None = None
        # The time of the first failure by its cause, until a success refutes that a service is down. The oldest first.
        self._suspected: dict[str, float] = {}
        # The times at which a success has refuted that a service is down, by the cause of the failures, the oldest
        # first.
        self._refuted: dict[str, float] = {}
        # The cause, the `since` and the end of the last outage; None before the first one.
        self._last: tuple[str, float, float] | None = None

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

    def succeeded(self, now: float, began_at: float | None = None) -> None:
        """Record a successful call, which ends the outage and the series of failures.

        `began_at`: when the call began; None if that is not known, which counts as now. A call that began before a
        failure does not refute that the service is down. A pause that a handler has requested still lasts its full
        time, because the successful call may have begun before the request.
        """
        if not self._cause and not self._suspected and self.resume_at is None:
            # There was no failure, so there is nothing to end.
            self._succeeded_at, self.has_succeeded = now, True
            return
        if self._lasts_as_asked(now):
            return
        if self.resume_at is None:
            before = now if began_at is None else began_at
            for cause in [cause for cause, failed_at in self._suspected.items() if failed_at <= before]:
                del self._suspected[cause]
                _remember(self._refuted, cause, now)
        self._succeeded_at = now
        self._reset(now)
        self.has_succeeded = True

    def _lasts_as_asked(self, now: float) -> bool:
        return self._asked and self.resume_at is not None and now < self.resume_at

    def _reset(self, now: float) -> None:
        self._end(now)
        self._asked = False
        self._error = self._cause = ""
        self._failed = []
        self._pauses = 0
        self._is_over_time = False

    def _end(self, now: float) -> None:
        if self.resume_at is not None:
            self._last = (self._cause, self.since, now)
            # A success after an outage does not say that its failures were chance.
            self._suspected = {}
        self.resume_at = None

    def not_started(self, error: str, now: float) -> float:
        """Record a call that failed before the handler. Return the time at which the pause ends."""
        return self._pause(error, now, longest_seconds=_LONGEST_BEFORE_CALLS_SECONDS)

    def unavailable(self, error: str, now: float, pause_seconds: float | None) -> float:
        """Record a call whose handler has said that its service is down. Return the time at which the pause ends."""
        return self._pause(error, now, pause_seconds)

    def failed(
        self,
        messages: Iterable[Hashable],
        error: str,
        now: float,
        cause: str = "",
        *,
        is_batch: bool = False,
        is_retried: bool = False,
    ) -> float | None:
        """Record that a call with these messages has failed.

        `error` is shown to operators. Failures belong together if they have the same `cause`, by default the error.
        `is_batch`: the call has several messages. `is_retried`: all its messages have failed before. Such calls begin
        no outage while others succeed. Return the end of the pause, or None if the failure counts as an attempt.
        """
        cause = cause or error
        if self.resume_at is None:
            while_others_succeed = _is_recent(self._succeeded_at, now)
            if (is_batch and while_others_succeed) or (is_retried and (while_others_succeed or cause in self._refuted)):
                return None
        if cause != self._cause:
            if not self._lasts_as_asked(now):
                self._reset(now)
            self._cause, self.since = cause, now
        self._error = error
        if cause not in self._suspected:
            _remember(self._suspected, cause, now)
        needed = self._needed(cause, now)
        call = frozenset(messages)
        self._failed = [other for other in self._failed if other.isdisjoint(call)]
        if len(self._failed) < needed:
            self._failed.append(call)
        if self._is_over_time or (len(self._failed) < needed and self.resume_at is None):
            return None
        if self.resume_at is None:
            self._began = now
        if now - self._began >= self._believed_seconds():
            # Until a call succeeds, there are no more pauses, and every failure counts as an attempt.
            self._is_over_time = True
            self._end(now)
            return None
        return self._pause(error, now, cause=cause)

    def _needed(self, cause: str, now: float) -> int:
        """Return how many calls in a row must fail with this cause until they are an outage."""
        if self._subscription.retry.exhausted(2):
            return _IN_A_ROW
        by_chance = _is_recent(self._succeeded_at, now) and _is_recent(self._refuted.get(cause), now)
        return _IN_A_ROW_BY_CHANCE if by_chance else _IN_A_ROW

    def _pause(
        self,
        error: str,
        now: float,
        wished_seconds: float | None = None,
        *,
        longest_seconds: float = math.inf,
        cause: str = "",
    ) -> float:
        if not self._error:
            self.since = now
        self._error, self._cause = error, cause or error
        self._asked = self._asked or wished_seconds is not None
        if self.resume_at is None:
            self._began, self.has_succeeded = now, False
            self._continue_last()
        elif now < self.resume_at:
            # This call was still running when the pause began, so its failure does not start another pause.
            self.resume_at = max(self.resume_at, now + (wished_seconds or 0.0))
            return self.resume_at
        self._pauses += 1
        level = self._subscription.retry.level_seconds(self._pauses)
        pause = min(_PAUSES.pause_seconds(self._pauses), level, longest_seconds)
        self.resume_at = now + (pause if wished_seconds is None else wished_seconds)
        return self.resume_at

    def _continue_last(self) -> None:
        """Let the outage that begins have the `since` of the last one, if that had this cause and has just ended."""
        if self._last is not None:
            cause, since, ended_at = self._last
            if cause == self._cause and _is_recent(ended_at, self.since):
                self.since = since

    def _believed_seconds(self) -> float:
        retry = self._subscription.retry
        if retry.max_attempts is None:
            return float("inf")
        return sum(retry.delay_seconds(attempt) for attempt in range(1, retry.max_attempts))


def _remember(times: dict[str, float], cause: str, now: float) -> None:
    """Add the time as the newest one, and forget the oldest one if there are too many."""
    times.pop(cause, None)
    times[cause] = now
    if len(times) > _KNOWN_CAUSES:
        del times[next(iter(times))]


def _is_recent(at: float | None, now: float) -> bool:
    return at is not None and now - at < _RECENT_SECONDS


# -- failed attempts -------------------------------------------------------------------------------


_LOCAL_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A message whose attempt failed."""

    subscribed: Subscribed
    item: FetchedEntry
    error: BaseException


def record_failures(run: Executor, instance: UUID, failures: Sequence[Failed]) -> list[FetchedEntry]:
    """Record failed attempts. Each message is then finished, waits in a stopped queue, or has a new due time.

    The function marks a message as finished if it was sent back or made a dead letter. The function sets the due times
    of the messages that this process tries again, and returns these messages.

    If the recording fails, this process tries all these messages again, so no message is lost, and no offset moves past
    an unfinished message. If the connection is lost, the failures may be recorded although the answer is missing. Then
    the function raises psycopg.Error, and the caller calls it again with the same failures.
    """
    judged = [(failed, _until_time_limit(failed.item, _judge(failed))) for failed in failures]
    try:
        faults.point("consumer.before_send_back")
        kept = _record(run, instance, judged)
        faults.point("consumer.after_send_back")
    except (psycopg.Error, OutboxError) as error:
        if run.connection.closed:
            raise
        for failed, judgement in judged:
            _report(failed, judgement)
        logger.warning("%d failed messages could not be sent back and are tried here again: %s", len(judged), error)
        return [_again(failed.item, _LOCAL_RETRY_SECONDS) for failed, _ in judged]
    again: list[FetchedEntry] = []
    for failed, judgement in judged:
        _report(failed, judgement)
        item, queue, verdict = failed.item, failed.item.queue, judgement.verdict
        if not failed.subscribed.group.broadcast and queue.key not in kept:
            continue
        # Only now, after the failures are recorded: if a message were marked as finished before, a crash between the
        # two steps would lose it.
        if verdict is FailureAction.IN_PLACE:
            again.append(_again(item, judgement.delay_seconds))
        elif verdict is FailureAction.STOP:
            # The message is not finished, so the offset does not pass it. The process fetches the message again when an
            # operator resumes the group.
            queue.stop()
        else:
            is_sent_back = verdict is FailureAction.SEND_BACK
            queue.window.finish(item.offset, EntryOutcome.SENT_BACK if is_sent_back else EntryOutcome.DEAD)
            if verdict is FailureAction.DEAD:
                _tell(failed)
    return again


def _tell(failed: Failed) -> None:
    """Tell the listener, if there is one, about a stored dead letter. A broadcast group has no dead letters."""
    item, group = failed.item, failed.subscribed.group
    assert item.row is not None
    if given_up.listener is not None and not group.broadcast:
        given_up.listener(
            given_up.GivenUp(
                group=group.name,
                topic=failed.subscribed.subscription.topic,
                key=item.row[KEY],
                message_id=item.row[MESSAGE_ID],
                attempts=item.attempt,
                error=describe(failed.error),
            )
        )


# A COMMIT that ends its session each time must not be tried for ever: an attempt after these counts.
_MOST_UNCOUNTED: Final = 20


def _judge(failed: Failed) -> FailurePlan:
    item, error = failed.item, failed.error
    if isinstance(error, TimedOut):
        return FailurePlan(FailureAction.TIMED_OUT)
    if isinstance(error, KillsItsProcess):
        # The error rules of the subscription do not apply, because the handler did not raise this error.
        return FailurePlan(FailureAction.DEAD)
    if isinstance(error, LeaseLost) and item.in_place < _MOST_UNCOUNTED:
        # The fence has stopped this attempt, or it may have committed, so the handler has not failed. If this process
        # still holds the lease, it tries the message again soon.
        return FailurePlan(FailureAction.IN_PLACE, _LOCAL_RETRY_SECONDS)
    return send_back.judge(
        failed.subscribed.subscription,
        error,
        retries=item.retries,
        in_place=item.in_place,
        returned=item.queue.subscribed is None,
    )


def _until_time_limit(item: FetchedEntry, plan: FailurePlan) -> FailurePlan:
    """Return the plan with a wait that ends at the latest when the time limit of the message ends.

    No attempt begins after the limit. So a longer wait would only keep the message, and the messages of its key, for no
    attempt.
    """
    if item.ends_at is None:
        return plan
    return replace(plan, delay_seconds=min(plan.delay_seconds, max(0.0, item.ends_at - time.monotonic())))


def _record(run: Executor, instance: UUID, judged: Sequence[tuple[Failed, FailurePlan]]) -> set[leases.QueueKey]:
    """Store the failures. Return the keys of the queues whose leases this process still holds.

    If `judged` has two failures of one message in one group, the function stores them by two statements.
    """
    kept: set[leases.QueueKey] = set()
    rounds: list[dict[tuple[int, int], Failure]] = []
    for failed, judgement in judged:
        if not failed.subscribed.group.broadcast:
            failure = _failure(run, failed, judgement)
            place = (failure.lease.key[0], failure.log_id)
            target = next((known for known in rounds if place not in known), None)
            if target is None:
                rounds.append(target := {})
            target[place] = failure
    for known in rounds:
        kept |= send_back.record(run, instance, list(known.values()))
    for failed, judgement in judged:
        queue = failed.item.queue
        if queue.key in kept:
            queue.swept_offset = queue.stored_offset
        if judgement.verdict is FailureAction.STOP and not failed.subscribed.group.broadcast:
            reason = describe(failed.error)
            leases.stop(run, instance, queue.lease, reason)
    if any(judgement.verdict is FailureAction.SEND_BACK for _, judgement in judged):
        # Wake the sequencer, because these messages may be due before the message for which the sequencer waits.
        notify(run, Channel.DECIDED)
    return kept


def _again(item: FetchedEntry, delay_seconds: float) -> FetchedEntry:
    item.in_place += 1
    item.due = time.monotonic() + delay_seconds
    return item


def _failure(run: Executor, failed: Failed, judgement: FailurePlan) -> Failure:
    item = failed.item
    assert item.row is not None
    group, (_, topic_id) = failed.subscribed.group, failed.subscribed.key
    sent_back = judgement.verdict is FailureAction.SEND_BACK
    return Failure(
        lease=item.queue.lease,
        offset=item.offset,
        stored_offset=item.queue.stored_offset,
        swept_offset=item.queue.swept_offset,
        log_id=item.row[LOG_ID],
        attempts=item.attempt,
        error=describe(failed.error),
        judgement=judgement,
        retry_queue_id=_retry_queue(run, group, topic_id) if sent_back else 0,
        next_attempt=item.retries + 1,
    )


def _retry_queue(run: Executor, group: ConsumingGroup, topic_id: int) -> int:
    if topic_id not in group.retry_queues:
        group.retry_queues[topic_id] = registration.ensure_retry_queue(run, group.group_id, topic_id)
    return group.retry_queues[topic_id]


def _report(failed: Failed, judgement: FailurePlan) -> None:
    item = failed.item
    assert item.row is not None
    if isinstance(failed.error, TimedOut):
        logger.info(
            "group %s: message %s of %s is timed out: its time limit was over before attempt %d began",
            failed.subscribed.group.name,
            item.row[MESSAGE_ID],
            item.queue.name,
            item.attempt,
            extra=_about(failed, item.row),
        )
        return
    level = logging.ERROR if judgement.verdict in (FailureAction.DEAD, FailureAction.STOP) else logging.WARNING
    logger.log(
        level,
        "group %s: attempt %d at message %s of %s failed: %s",
        failed.subscribed.group.name,
        item.attempt,
        item.row[MESSAGE_ID],
        item.queue.name,
        _CONSEQUENCES[judgement.verdict].format(judgement.delay_seconds),
        exc_info=printable(failed.error),
        extra=_about(failed, item.row),
    )


def _about(failed: Failed, row: Row) -> dict[str, str]:
    return log_context.about(
        message_id=row[MESSAGE_ID],
        transaction_id=row[TRANSACTION_ID] or row[MESSAGE_ID],
        group=failed.subscribed.group.name,
        topic=failed.subscribed.subscription.topic,
        key=row[KEY],
    )


_CONSEQUENCES: Final = {
    FailureAction.SEND_BACK: "it is sent back for another attempt in {:g} s",
    FailureAction.IN_PLACE: "it is tried here again in {:g} s",
    FailureAction.DEAD: "it is given up",
    FailureAction.STOP: "its queue is stopped until an operator resumes the group",
}


# -- claimed messages ------------------------------------------------------------------------------
#
# See outbox/broker/groups/redelivery.py.

# In ordered modes, a process asks again after this time (seconds) whether a message is still claimed elsewhere.
_ASK_SECONDS: Final = 1.0


def leave_queue(run: Executor, instance: UUID, work: HandlerCall) -> bool:
    """Let the claimed message of a running call leave its queue. Return False if this process has lost the queue."""
    [item] = work.items
    faults.point("claim.before_leave")
    place = _redelivery(run, work.subscribed, item)
    kept = _leave(run, instance, item, place, work.term_seconds)
    # If this process has lost the queue, the next owner stores the same redelivery, because the claim has not ended.
    work.redelivery = place
    work.renew_at = time.monotonic() + work.term_seconds / 3
    faults.point("claim.after_leave")
    return kept


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that leaves its queue for `seconds`, without an attempt.

    `is_claimed`: another attempt has claimed the message. Otherwise the message waits for newer code.
    """

    subscribed: Subscribed
    item: FetchedEntry
    seconds: float
    is_claimed: bool


def put_back(run: Executor, instance: UUID, waiting: Sequence[Waiting]) -> tuple[list[FetchedEntry], list[OwnedQueue]]:
    """Let messages leave their queues for a time: until the claim of another attempt ends, or newer code is there.

    Return the messages that could not be stored, which wait in this process, and the queues that this process has lost.
    """
    again: list[FetchedEntry] = []
    lost: list[OwnedQueue] = []
    for one in waiting:
        item = one.item
        try:
            place = _redelivery(run, one.subscribed, item)
            if not _leave(run, instance, item, place, one.seconds, is_claimed=one.is_claimed):
                lost.append(item.queue)
        except (psycopg.Error, OutboxError) as error:
            logger.warning("a message that should leave its queue waits in this process: %s", error)
            item.due = time.monotonic() + _LOCAL_RETRY_SECONDS
            again.append(item)
    return again, lost


def _leave(
    run: Executor, instance: UUID, item: FetchedEntry, place: Redelivery, seconds: float, *, is_claimed: bool = True
) -> bool:
    queue = item.queue
    if not redelivery.leave_queue(
        run,
        instance,
        queue.lease,
        item.offset,
        place,
        seconds=seconds,
        is_claimed=is_claimed,
        passed=(queue.swept_offset, queue.stored_offset),
    ):
        return False
    queue.swept_offset = queue.stored_offset
    queue.window.finish(item.offset, EntryOutcome.SENT_BACK)
    return True


def _redelivery(run: Executor, subscribed: Subscribed, item: FetchedEntry) -> Redelivery:
    assert item.row is not None
    group, (_, topic_id) = subscribed.group, subscribed.key
    return Redelivery(item.row[LOG_ID], _retry_queue(run, group, topic_id), item.retries)


def record_left(run: Executor, work: HandlerCall, result: Result, outage: Outage) -> None:
    """Record the result of a call whose message has left its queue.

    If the result is not recorded, the message is delivered again when its claim has ended. Then the inbox knows whether
    it is done.
    """
    faults.point("claim.before_settle")
    [item], place = work.items, work.redelivery
    if isinstance(result, Disposition):
        _succeeded(work, [result], outage)
        if place is not None:
            redelivery.postpone(run, place, seconds=0.0, is_claimed=False)
    elif not isinstance(result, BaseException) or isinstance(result, LeaseLost):
        # This process ends, or another attempt has taken the message over.
        pass
    elif place is None:
        assert item.row is not None
        logger.warning(
            "group %s: an attempt at message %s of %s failed after this process had given its queue up. It does not "
            "count as an attempt; the next owner of the queue tries the message again",
            work.subscribed.group.name,
            item.row[MESSAGE_ID],
            item.queue.name,
            exc_info=printable(result),
        )
    elif (until := _outage(work, work.items, result, outage)) is not None:
        redelivery.postpone(run, place, seconds=max(0.0, until - time.monotonic()), is_claimed=False)
    else:
        _record_failure(run, Failed(work.subscribed, item, result), place)
    faults.point("claim.after_settle")


def _record_failure(run: Executor, failed: Failed, place: Redelivery) -> None:
    item = failed.item
    judged = send_back.judge(
        failed.subscribed.subscription, failed.error, retries=item.retries, in_place=item.in_place, returned=True
    )
    plan = _until_time_limit(item, judged)
    _report(failed, plan)
    is_dead = plan.verdict is FailureAction.DEAD
    is_recorded = redelivery.record_failure(
        run,
        failed.subscribed.group.group_id,
        place,
        dead=is_dead,
        attempts=item.attempt,
        error=describe(failed.error),
        seconds=plan.delay_seconds,
    )
    notify(run, Channel.DECIDED)
    if is_recorded and is_dead:
        _tell(failed)


def postpone(run: Executor, work: HandlerCall) -> None:
    """Postpone the redelivery of a claimed message, because its handler still runs."""
    if work.redelivery is not None:
        redelivery.postpone(run, work.redelivery, seconds=work.term_seconds, is_claimed=True)
    work.renew_at = time.monotonic() + work.term_seconds / 3


# -- results of calls ------------------------------------------------------------------------------
#
# If a call with several messages fails, the error does not show which message has caused the failure. So the consumer
# halves the batch and calls the handler for each half, until a call has only one message. Only a failed call with one
# message counts as a failed attempt.


_OUTCOMES: Final = {Disposition.HANDLED: EntryOutcome.HANDLED, Disposition.SKIPPED: EntryOutcome.SKIPPED}


@dataclass
class CallOutcome:
    """The unfinished messages of a call, and the queues whose lease is over.

    `again`: the `id()` of each item that goes back to its lane and whose attempt does not count. `waiting`: the
    messages that leave their queues for a time. `lost`: the queues whose lease is over.
    """

    failed: list[Failed] = field(default_factory=list)
    again: set[int] = field(default_factory=set)
    waiting: list[Waiting] = field(default_factory=list)
    lost: list[OwnedQueue] = field(default_factory=list)


def book(work: HandlerCall, results: Sequence[Result], outage: Outage) -> CallOutcome:
    """Mark the handled messages of a call as finished, and return the unfinished messages.

    If the handler has handled all messages of the call, the dispatching thread books it without this function.
    """
    booked = CallOutcome()
    errors: list[tuple[FetchedEntry, BaseException]] = []
    for item, result in zip(work.items, results, strict=True):
        queue = item.queue
        if queue.phase is Phase.LOST or queue in booked.lost:
            # The next owner of the queue delivers this message again, so this process records neither success nor
            # failure.
            continue
        if isinstance(result, Disposition):
            queue.window.finish(item.offset, _OUTCOMES[result])
        elif isinstance(result, NeedsNewerCode):
            _wait_for_code(work, item, booked)
        elif isinstance(result, BaseException):
            errors.append((item, result))
        elif isinstance(result, ClaimedElsewhere) and not work.keeps_order:
            booked.waiting.append(Waiting(work.subscribed, item, result.seconds, is_claimed=True))
        elif isinstance(result, ClaimedElsewhere):
            # The message blocks the later messages of its key, so it waits here. Another process may finish it before
            # the end of the claim. If calls need an admission, each question costs one, so this process asks only once.
            is_admitted = work.subscribed.admission_lease is not None
            seconds = result.seconds if is_admitted else min(result.seconds, _ASK_SECONDS)
            _keep(item, time.monotonic() + seconds, booked)
        elif isinstance(result, Postponed) or queue.trusted():
            # The handler was not called, perhaps because the lease had expired for a moment and was then renewed. So
            # the message goes back into its lane.
            _keep(item, result.until if isinstance(result, Postponed) else 0.0, booked)
        elif queue.phase is not Phase.STOPPED:
            # This process gives the queue up now. If the lease were renewed before the next check, this message would
            # stay unfinished.
            booked.lost.append(queue)
    if any(isinstance(result, Disposition) for result in results):
        _succeeded(work, results, outage)
        _book_each(work, errors, booked)
    elif errors:
        _book_failure(work, errors, outage, booked)
    return booked


def _succeeded(work: HandlerCall, results: Sequence[Result], outage: Outage) -> None:
    """Record the success of a call. For a duplicate, no handler was called, so it says nothing about the service."""
    for result in results:
        if result is Disposition.HANDLED:
            outage.succeeded(time.monotonic(), work.started_at)
            break


def _wait_for_code(work: HandlerCall, item: FetchedEntry, booked: CallOutcome) -> None:
    """Let a message wait for newer code, without an attempt.

    In ordered modes, the message blocks the later messages of its key, so it waits in this process. In a broadcast
    group, only this process has the message. Otherwise it leaves its queue, and any process of the group may get it.
    """
    assert item.row is not None
    seconds = code_wait_seconds(datetime.now(UTC), item.row[BORN_AT])
    if work.keeps_order or work.subscribed.group.broadcast:
        _keep(item, time.monotonic() + seconds, booked)
    else:
        booked.waiting.append(Waiting(work.subscribed, item, seconds, is_claimed=False))


def _book_failure(
    work: HandlerCall, errors: Sequence[tuple[FetchedEntry, BaseException]], outage: Outage, booked: CallOutcome
) -> None:
    """Book a call in which no message was handled, and decide for which messages the call is a failed attempt."""
    uncalled = (UndecodableBody, TimedOut)
    booked.failed += [Failed(work.subscribed, item, error) for item, error in errors if isinstance(error, uncalled)]
    called = [(item, error) for item, error in errors if not isinstance(error, uncalled)]
    if not called:
        return
    items, error = [item for item, _ in called], called[0][1]
    if any(other is not error for _, other in called) or isinstance(error, (LeaseLost, KillsItsProcess)):
        # The handler gave a separate error for each message, the fence stopped the call, or a message kills its
        # process.
        _book_each(work, called, booked)
        return
    until = _outage(work, items, error, outage)
    if until is not None:
        for item in items:
            _keep(item, until, booked)
    elif len(items) == 1:
        booked.failed.append(Failed(work.subscribed, items[0], error))
    else:
        logger.warning(
            "group %s: a call with %d messages failed; the batch is halved to find the message that fails: %s",
            work.subscribed.group.name,
            len(items),
            describe(error),
        )
        divide(items, (len(items) + 1) // 2)
        for item in items:
            _keep(item, 0.0, booked)


def _book_each(work: HandlerCall, errors: Sequence[tuple[FetchedEntry, BaseException]], booked: CallOutcome) -> None:
    """Book an error for each message. A message whose handling could not begin waits, and has no failed attempt."""
    for item, error in errors:
        if isinstance(error, HandlerNotStarted):
            _keep(item, time.monotonic() + max(1.0, work.subscribed.subscription.suspend_seconds), booked)
        else:
            booked.failed.append(Failed(work.subscribed, item, error))


def _outage(work: HandlerCall, items: Sequence[FetchedEntry], error: BaseException, outage: Outage) -> float | None:
    now = time.monotonic()
    text = describe(error)
    until: float | None
    if isinstance(error, ServiceUnavailable):
        until = outage.unavailable(text, now, error.pause_seconds)
    elif isinstance(error, HandlerNotStarted) or is_refused(error):
        until = outage.not_started(text, now)
    elif _is_unexplained(work.subscribed.subscription, error):
        is_retried = all(item.retries or item.in_place for item in items)
        messages = [(item.queue.key, item.offset) for item in items]
        until = outage.failed(messages, text, now, cause_of(error), is_batch=len(items) > 1, is_retried=is_retried)
        if until is not None and len(items) > 1:
            # If each batch has a message that always fails, only a smaller call can end the outage.
            divide(items, (len(items) + 1) // 2)
    else:
        return None
    if until is not None:
        logger.warning(
            "group %s: %d messages of %s wait %.1f s, because a service seems to be down. The failed call does not "
            "count as an attempt: %s",
            work.subscribed.group.name,
            len(items),
            work.subscribed.subscription.topic,
            until - now,
            text,
        )
    return until


def _is_unexplained(subscription: Subscription, error: BaseException) -> bool:
    """Return whether the error may mean that a service is down.

    True only for an error that neither the handler nor the subscription has classified.

    An IntegrityError of Django or of a database driver (PEP 249) is the answer of a working database, so the result is
    then False.
    """
    return (
        subscription.reaction(error) is OnError.RETRY
        and not isinstance(error, RetryLater)
        and not any(class_name_of(kind) == "IntegrityError" for kind in type(error).__mro__)
    )


def _keep(item: FetchedEntry, due: float, booked: CallOutcome) -> None:
    if item.queue.phase is not Phase.STOPPED:
        # The items of a stopped queue do not go back to the lane, because the process fetches them again when an
        # operator resumes the queue.
        item.due = due
        booked.again.add(id(item))
