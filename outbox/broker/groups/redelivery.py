"""Messages that have left their queue without an attempt: a row of `scheduled` delivers such a message again.

A message leaves its queue if it is claimed, or if it is of a version that only newer code knows (decision 251).

So that the queue's offset need not wait for the handler of a claim, the consumer marks the message as finished in its
queue (sent back), and schedules it for the retry queue of its group, due at the end of the claim's term. While the
handler runs, the consumer moves the due time. When it has returned, the row is due at once, and the inbox row makes the
redelivery a duplicate. The column `claimed` says that the row waits for the end of a claim, and not for another
attempt; a recall does not take such a row. If the leader has queued the message meanwhile, no row is found, and the
next consumer decides about it, so each statement takes effect at most once. See decision 203.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.leases import Lease
from outbox.retry import MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class Redelivery:
    """The place of a claimed message that has left its queue, in the table `scheduled`."""

    log_id: int
    retry_queue_id: int
    attempt: int


_LEAVE: Final = Statement("""
WITH held AS MATERIALIZED (
    SELECT FROM {schema}.queue_lease
    WHERE group_id = %(group_id)s AND queue_id = %(queue_id)s AND epoch = %(epoch)s AND owner = %(owner)s
), redelivered AS (
    INSERT INTO {schema}.scheduled (log_id, due_at, queue_id, attempt, claimed)
    SELECT %(log_id)s, clock_timestamp() + make_interval(secs => %(seconds)s), %(retry_queue_id)s, %(attempt)s,
           %(is_claimed)s
    FROM held
    ON CONFLICT DO NOTHING
    RETURNING log_id
), passed AS (
    DELETE FROM {schema}.finished_ahead ahead USING held
    WHERE ahead.group_id = %(group_id)s AND ahead.queue_id = %(queue_id)s
      AND ahead.queue_offset >= %(swept_offset)s AND ahead.queue_offset < %(stored_offset)s
), left_queue AS (
    INSERT INTO {schema}.finished_ahead (group_id, queue_id, queue_offset, is_dead)
    SELECT %(group_id)s, %(queue_id)s, %(offset)s, false FROM held
    ON CONFLICT DO NOTHING
    RETURNING group_id
), counted AS (
    -- After a reset, the group may have an entry of a message that waits for this attempt already.
    UPDATE {schema}.subscription known SET discarded = known.discarded + 1
    FROM left_queue CROSS JOIN {schema}.commit_log log
    WHERE log.log_id = %(log_id)s AND NOT EXISTS (SELECT FROM redelivered)
      AND known.group_id = left_queue.group_id AND known.topic_id = log.topic_id
)
SELECT count(*) FROM held
""")


def leave_queue(
    run: Executor,
    owner: UUID,
    lease: Lease,
    offset: int,
    redelivery: Redelivery,
    *,
    seconds: float,
    is_claimed: bool,
    passed: tuple[int, int],
) -> bool:
    """Let the message at `offset` leave its queue: deliver it again after `seconds`, without an attempt.

    `passed`: the offsets whose `finished_ahead` rows are not needed any more. Return False, and store nothing, if this
    owner has lost the queue. A second call has no further effect.
    """
    group_id, queue_id = lease.key
    parameters = {
        "owner": owner,
        "group_id": group_id,
        "queue_id": queue_id,
        "epoch": lease.epoch,
        "offset": offset,
        "seconds": seconds,
        "is_claimed": is_claimed,
        "swept_offset": passed[0],
        "stored_offset": passed[1],
        **asdict(redelivery),
    }
    return bool(run.one(_LEAVE, parameters)[0])


_POSTPONE: Final = Statement("""
UPDATE {schema}.scheduled
SET due_at = clock_timestamp() + make_interval(secs => %(seconds)s), claimed = %(is_claimed)s
WHERE log_id = %(log_id)s AND queue_id = %(retry_queue_id)s AND attempt = %(attempt)s
""")


def postpone(run: Executor, redelivery: Redelivery, *, seconds: float, is_claimed: bool) -> bool:
    """Deliver the message `seconds` from now. `is_claimed`: whether the handler of the message still runs.

    Return False if the message does not wait for its redelivery any more.
    """
    return run.count(_POSTPONE, {"seconds": seconds, "is_claimed": is_claimed, **asdict(redelivery)}) > 0


_RECORD: Final = Statement("""
WITH taken AS (
    DELETE FROM {schema}.scheduled
    WHERE log_id = %(log_id)s AND queue_id = %(retry_queue_id)s AND attempt = %(attempt)s
    RETURNING log_id
), retried AS (
    INSERT INTO {schema}.scheduled (log_id, due_at, queue_id, attempt)
    SELECT log_id, clock_timestamp() + make_interval(secs => %(seconds)s), %(retry_queue_id)s, %(next_attempt)s
    FROM taken WHERE NOT %(dead)s
    ON CONFLICT DO NOTHING
    RETURNING log_id
), dead_before AS (
    SELECT log_id FROM {schema}.dead_letter
    WHERE %(dead)s AND group_id = %(group_id)s AND log_id = %(log_id)s AND replayed_at IS NULL
), dead AS (
    INSERT INTO {schema}.dead_letter AS known (group_id, log_id, attempts, error)
    SELECT %(group_id)s, log_id, %(attempts)s, %(error)s FROM taken WHERE %(dead)s
    ON CONFLICT (group_id, log_id) DO UPDATE
    SET attempts = excluded.attempts, error = excluded.error, dead_at = now(), replayed_at = NULL, discarded_at = NULL
), counted AS (
    -- After a reset, the group may have an entry of a message that waits for this attempt already or is dead already.
    UPDATE {schema}.subscription known SET discarded = known.discarded + 1
    FROM taken JOIN {schema}.commit_log log USING (log_id)
    WHERE CASE WHEN %(dead)s THEN EXISTS (SELECT FROM dead_before) ELSE NOT EXISTS (SELECT FROM retried) END
      AND known.group_id = %(group_id)s AND known.topic_id = log.topic_id
), recorded AS (
    INSERT INTO {schema}.failure AS known (group_id, log_id, attempt, error)
    SELECT %(group_id)s, log_id, %(attempts)s - 1, %(error)s FROM taken
    ON CONFLICT (group_id, log_id, attempt) DO UPDATE SET error = excluded.error, failed_at = clock_timestamp()
)
SELECT count(*) FROM taken
""")


def record_failure(
    run: Executor,
    group_id: int,
    redelivery: Redelivery,
    *,
    dead: bool,
    attempts: int,
    error: str,
    seconds: float = 0.0,
) -> bool:
    """Store a failed attempt, which is the number `attempts`, at a message that has left its queue.

    If `dead`, the message becomes a dead letter. Otherwise it is delivered again after `seconds`. Return False, and
    store nothing, if it does not wait for its redelivery any more.
    """
    parameters = {
        "group_id": group_id,
        "dead": dead,
        "attempts": min(attempts, MAX_ATTEMPTS),
        "next_attempt": min(redelivery.attempt + 1, MAX_ATTEMPTS),
        "error": error,
        "seconds": seconds,
        **asdict(redelivery),
    }
    return int(run.one(_RECORD, parameters)[0]) > 0
