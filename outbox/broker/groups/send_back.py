"""Decide what to do with failed messages, and record it in one statement that is fenced by the leases.

A failed message is scheduled for the group's retry queue, due after the delay of its retry level; after the last
attempt, it is made a dead letter. For every failed attempt, the table `failure` has a row with the error; if the time
limit of a message was over before an attempt began, `timed_out` has a row instead.

This corresponds to RocketMQ's consumerSendMsgBack.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Final
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.errors import RetryLater
from outbox.retry import MAX_ATTEMPTS
from outbox.subscription import Mode, OnError, Subscription
from outbox.utils.safe_text import LONGEST_TEXT, error_line, frames_of, storable

# The code of outbox itself.
_OUTBOX: Final = str(Path(__file__).parents[2]) + os.sep
# The code of installed packages and of the standard library.
_INSTALLED: Final = re.compile(rf"/(?:site|dist)-packages/|^{re.escape(str(Path(os.__file__).parent))}/")


class FailureAction(enum.Enum):
    """What the consumer does with a message whose attempt has failed."""

    SEND_BACK = "send_back"
    """Schedule the message for the retry queue, and continue with the next message."""
    IN_PLACE = "in_place"
    """Keep the message and try it again in this process."""
    DEAD = "dead"
    """Make the message a dead letter."""
    TIMED_OUT = "timed_out"
    """Record that the time limit of the message was over before an attempt began."""
    STOP = "stop"
    """Stop the queue. The failed message stays the next message of the queue."""


@dataclass(frozen=True, slots=True)
class FailurePlan:
    """An action and, if the message is tried again, the wait (seconds) before the next attempt."""

    verdict: FailureAction
    delay_seconds: float = 0.0


def judge(
    subscription: Subscription, error: BaseException, *, retries: int, in_place: int, returned: bool
) -> FailurePlan:
    """Return what the consumer does with a message after an attempt raised `error`.

    `retries` counts how often the message was sent back, and `in_place` the failed attempts since this process fetched
    it. A message that has `returned` from the retry queue has lost its order, so it is not retried in place. A
    broadcast group has no retry queue, so every message is.
    """
    reaction = subscription.reaction(error)
    if reaction is OnError.STOP:
        return FailurePlan(FailureAction.STOP)
    if reaction is OnError.DEAD_LETTER:
        return FailurePlan(FailureAction.DEAD)
    if reaction is OnError.RETRY and not returned and subscription.mode is not Mode.CONCURRENT:
        if subscription.max_suspends is not None and in_place >= subscription.max_suspends:
            return FailurePlan(FailureAction.DEAD)
        chosen = isinstance(error, RetryLater)
        delay = subscription.retry_delay_seconds(error, 1) if chosen else subscription.suspend_seconds
        return FailurePlan(FailureAction.IN_PLACE, delay)
    attempts = (in_place if subscription.broadcast else retries) + 1
    if subscription.retry.exhausted(attempts):
        return FailurePlan(FailureAction.DEAD)
    verdict = FailureAction.IN_PLACE if subscription.broadcast else FailureAction.SEND_BACK
    return FailurePlan(verdict, subscription.retry_delay_seconds(error, attempts))


def describe(error: BaseException) -> str:
    """Return the error in its stored form: its type, its text, and the line of the application that raised it.

    A line of a driver or of the standard library is named only if there is no other.
    """
    places = _places(error)
    return _text(error, [one for one in places if not _INSTALLED.search(one.filename)] or places)


def cause_of(error: BaseException) -> str:
    """Return a text that two errors of one cause have in common: type, text, and the last line that is not outbox's.

    A service that is down may fail at several lines of a handler, but at one line of its driver.
    """
    return _text(error, _places(error))


def _places(error: BaseException) -> list[FrameSummary]:
    # "<string>" is the generated code of a dataclass.
    return [one for one in frames_of(error) if not one.filename.startswith((_OUTBOX, "<"))]


def _text(error: BaseException, places: Sequence[FrameSummary]) -> str:
    place = ""
    if places:
        place = storable(f"\n  raised in {places[-1].name}, {places[-1].filename}:{places[-1].lineno}")[-LONGEST_TEXT:]
    # The line counts for the cause of the error, so a long text does not displace it.
    return storable(error_line(error))[: LONGEST_TEXT - len(place)] + place


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, which is the number `attempts`, at the message at `offset`.

    `stored_offset` is that of the queue. The `finished_ahead` rows before `swept_offset` are deleted already.
    """

    lease: Lease
    offset: int
    stored_offset: int
    swept_offset: int
    log_id: int
    attempts: int
    error: str
    judgement: FailurePlan
    retry_queue_id: int
    next_attempt: int


# If a message is retried in place for hours, the table `failure` keeps its first errors and the newest error.
_RECORD = Statement("""
WITH failed AS MATERIALIZED (
    SELECT given.*
    FROM unnest(
        %(group_ids)s::integer[], %(queue_ids)s::integer[], %(epochs)s::bigint[], %(log_ids)s::bigint[],
        %(attempts)s::integer[], %(errors)s::text[], %(verdicts)s::text[], %(delays)s::float8[],
        %(retry_queues)s::integer[], %(next_attempts)s::integer[], %(offsets)s::bigint[], %(stored_offsets)s::bigint[],
        %(swept_offsets)s::bigint[]
    ) AS given (group_id, queue_id, epoch, log_id, attempts, error, verdict, delay, retry_queue_id, next_attempt,
                queue_offset, stored_offset, swept_offset)
    JOIN {schema}.queue_lease held
      ON held.group_id = given.group_id AND held.queue_id = given.queue_id AND held.epoch = given.epoch
     AND held.owner = %(owner)s
), recorded AS (
    INSERT INTO {schema}.failure AS known (group_id, log_id, attempt, error)
    SELECT group_id, log_id, least(attempts, next_attempt + 100) - 1, error FROM failed
    WHERE verdict <> 'timed_out'
    ORDER BY group_id, log_id
    ON CONFLICT (group_id, log_id, attempt) DO UPDATE SET error = excluded.error, failed_at = clock_timestamp()
), sent_back AS (
    INSERT INTO {schema}.scheduled (log_id, due_at, queue_id, attempt)
    SELECT log_id, clock_timestamp() + make_interval(secs => delay), retry_queue_id, next_attempt FROM failed
    WHERE verdict = 'send_back'
    ORDER BY log_id, retry_queue_id, next_attempt
    ON CONFLICT DO NOTHING
    RETURNING log_id, queue_id, attempt
), dead_before AS (
    SELECT group_id, log_id FROM {schema}.dead_letter JOIN failed USING (group_id, log_id)
    WHERE verdict = 'dead' AND replayed_at IS NULL
), given_up AS (
    INSERT INTO {schema}.dead_letter AS known (group_id, log_id, attempts, error)
    SELECT group_id, log_id, attempts, error FROM failed
    WHERE verdict = 'dead'
    ORDER BY group_id, log_id
    ON CONFLICT (group_id, log_id) DO UPDATE
    SET attempts = excluded.attempts, error = excluded.error, dead_at = now(), replayed_at = NULL, discarded_at = NULL
), sent_away AS (
    INSERT INTO {schema}.finished_ahead (group_id, queue_id, queue_offset, is_dead)
    SELECT group_id, queue_id, queue_offset, verdict <> 'send_back' FROM failed
    WHERE verdict IN ('send_back', 'dead', 'timed_out')
    ORDER BY group_id, queue_id, queue_offset
    ON CONFLICT DO NOTHING
    RETURNING group_id, queue_id, queue_offset
), timed_out AS (
    -- Only new rows of finished_ahead: a repeated statement counts no entry twice.
    INSERT INTO {schema}.timed_out (group_id, log_id, queue_id, queue_offset)
    SELECT group_id, log_id, queue_id, queue_offset FROM failed JOIN sent_away USING (group_id, queue_id, queue_offset)
    WHERE verdict = 'timed_out'
    RETURNING group_id, log_id
), repeated AS (
    -- After a reset, a group may have an entry of a message that waits for the same attempt already or is dead already.
    SELECT group_id, log_id FROM failed JOIN sent_away USING (group_id, queue_id, queue_offset)
    WHERE verdict = 'send_back'
      AND (log_id, retry_queue_id, next_attempt) NOT IN (SELECT log_id, queue_id, attempt FROM sent_back)
       OR verdict = 'dead' AND (group_id, log_id) IN (SELECT group_id, log_id FROM dead_before)
), ended AS (
    SELECT group_id, topic_id, count(*) FILTER (WHERE is_late) AS timed_out,
           count(*) FILTER (WHERE NOT is_late) AS discarded
    FROM (SELECT *, true AS is_late FROM timed_out UNION ALL SELECT *, false FROM repeated) AS one
    JOIN {schema}.commit_log USING (log_id)
    GROUP BY group_id, topic_id
), locked AS MATERIALIZED (
    -- In this order, so that two consumers of several topics do not deadlock.
    SELECT group_id, topic_id, ended.timed_out, ended.discarded
    FROM {schema}.subscription JOIN ended USING (group_id, topic_id)
    ORDER BY group_id, topic_id FOR UPDATE OF subscription
), counted AS (
    UPDATE {schema}.subscription
    SET timed_out = subscription.timed_out + locked.timed_out, discarded = subscription.discarded + locked.discarded
    FROM locked
    WHERE subscription.group_id = locked.group_id AND subscription.topic_id = locked.topic_id
), passed AS (
    DELETE FROM {schema}.finished_ahead ahead
    USING (
        SELECT group_id, queue_id, min(swept_offset) AS swept_offset, min(stored_offset) AS stored_offset
        FROM failed GROUP BY group_id, queue_id
    ) queue
    WHERE ahead.group_id = queue.group_id AND ahead.queue_id = queue.queue_id
      -- Start where the last removal ended: rows removed there would be read again while a session holds a snapshot.
      AND ahead.queue_offset >= queue.swept_offset AND ahead.queue_offset < queue.stored_offset
)
SELECT DISTINCT group_id, queue_id FROM failed
""")


def record(run: Executor, owner: UUID, failures: Sequence[Failure]) -> set[QueueKey]:
    """Store failures and their consequences. Return the keys of the queues whose lease this owner still holds.

    Of a lost queue, nothing is stored: the next owner decides. Each message may appear only once in `failures`. A
    second call with the same failures has no further effect.
    """
    parameters = {
        "owner": owner,
        "group_ids": arrays.integers([failure.lease.key[0] for failure in failures]),
        "queue_ids": arrays.integers([failure.lease.key[1] for failure in failures]),
        "epochs": arrays.bigints([failure.lease.epoch for failure in failures]),
        "log_ids": arrays.bigints([failure.log_id for failure in failures]),
        "attempts": arrays.integers([min(failure.attempts, MAX_ATTEMPTS) for failure in failures]),
        "errors": arrays.texts([failure.error for failure in failures]),
        "verdicts": arrays.texts([failure.judgement.verdict.value for failure in failures]),
        "delays": [float(failure.judgement.delay_seconds) for failure in failures],
        "retry_queues": arrays.integers([failure.retry_queue_id for failure in failures]),
        "next_attempts": arrays.integers([min(failure.next_attempt, MAX_ATTEMPTS) for failure in failures]),
        "offsets": arrays.bigints([failure.offset for failure in failures]),
        "stored_offsets": arrays.bigints([failure.stored_offset for failure in failures]),
        "swept_offsets": arrays.bigints([failure.swept_offset for failure in failures]),
    }
    return set(run.execute(_RECORD, parameters))


_SENT_AWAY = Statement("""
SELECT queue_id, queue_offset, is_dead FROM {schema}.finished_ahead
WHERE group_id = %(group_id)s AND queue_id = ANY (%(queue_ids)s::integer[])
""")


def sent_away(run: Executor, group_id: int, queue_ids: Sequence[int]) -> dict[int, dict[int, bool]]:
    """Return the offsets of messages that a former owner sent back (False) or made dead letters (True), by queue."""
    found: dict[int, dict[int, bool]] = {queue_id: {} for queue_id in queue_ids}
    values = {"group_id": group_id, "queue_ids": arrays.integers(queue_ids)}
    for queue_id, offset, is_dead in run.rows(_SENT_AWAY, values):
        found[queue_id][offset] = is_dead
    return found


_FORGET = Statement("""
DELETE FROM {schema}.finished_ahead
WHERE group_id = %(group_id)s AND queue_id = ANY (%(queue_ids)s::integer[])
""")


def forget_sent_away(run: Executor, group_id: int, queue_ids: Sequence[int]) -> None:
    """Delete the `finished_ahead` rows of these queues, because an operator lets the group handle the queues again."""
    run.execute(_FORGET, {"group_id": group_id, "queue_ids": arrays.integers(queue_ids)})
