"""Remove messages that all consumer groups have passed, in passes of limited size."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from outbox.broker.database.arrays import bigints, integers
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind

# The queues with entries to clear, and for each queue the offset up to which its entries can be cleared. An entry is
# cleared after its topic's retention time if every group has consumed it, and after the hard cap in any case. The
# retention time counts from the time at which the message was stored, and the cap counts from the time of queueing.
# The entries of a deleted topic are cleared two hours after they were stored: until then, the ledger has rows of their
# transactions, and without their decisions these would look lost. If the server's clock was ahead, entries have times
# in the future: for those at the beginning of a queue, the times of the next entry with usual ones count (`usual`).
# `consumed` is the smallest position of the groups that read the queue. If no group reads the queue, no entry counts as
# consumed. Broadcast groups store no positions, so retention does not wait for them. The statement reads each queue in
# order and stops at the first entry that stays. So the statement reads only one entry of a queue that has nothing to
# clear.
_LIMITS: Final = Statement(
    """
WITH place AS (
    SELECT queue.queue_id, queue.floor, topic.topic_id, topic.retry_of, topic.retention_seconds, topic.deleted_at,
           now() - make_interval(secs => topic.retention_seconds) AS kept_since,
           now() - make_interval(secs => greatest(topic.retention_seconds, %(cap)s)) AS capped
    FROM {schema}.queue JOIN {schema}.topic USING (topic_id)
), reader AS (
    SELECT place.queue_id, group_id
    FROM place JOIN {schema}.subscription USING (topic_id) JOIN {schema}.consumer_group USING (group_id)
    WHERE NOT broadcast
    UNION ALL
    SELECT queue_id, retry_of FROM place WHERE retry_of IS NOT NULL
), consumed AS (
    SELECT reader.queue_id, min(coalesce(newest.next_offset, 0)) AS position
    FROM reader LEFT JOIN LATERAL """
    + newest_offset("reader.group_id", "reader.queue_id")
    + """ newest ON true
    GROUP BY reader.queue_id
), bounded AS (
    SELECT place.queue_id, place.floor, consumed.position AS consumed, place.retry_of IS NOT NULL AS is_retry,
           coalesce(
               (SELECT entry.queue_offset
                FROM (SELECT queue_offset, log_id, queued_at FROM {schema}.consume_queue
                      WHERE consume_queue.queue_id = place.queue_id AND queue_offset >= place.floor
                      ORDER BY queue_offset LIMIT %(batch)s) AS entry
                LEFT JOIN LATERAL (SELECT stored_at FROM {schema}.commit_log
                                   WHERE commit_log.log_id = entry.log_id OFFSET 0) AS log ON true
                CROSS JOIN LATERAL (
                    SELECT CASE WHEN queue_offset < first THEN usual.stored_at ELSE log.stored_at END AS stored_at,
                           CASE WHEN queue_offset < first THEN usual.queued_at ELSE entry.queued_at END AS queued_at
                ) AS known
                WHERE (CASE WHEN known.stored_at IS NULL THEN queue_offset < consumed.position
                            WHEN known.queued_at <= deleted_at THEN known.stored_at < now() - interval '2 hours'
                            WHEN known.stored_at >= kept_since THEN false
                            WHEN queue_offset < consumed.position OR deleted_at IS NOT NULL THEN true
                            WHEN known.stored_at >= capped THEN false
                            ELSE known.queued_at < capped
                       END) IS NOT TRUE
                ORDER BY entry.queue_offset LIMIT 1),
               (SELECT max(queue_offset) + 1
                FROM (SELECT queue_offset FROM {schema}.consume_queue
                      WHERE consume_queue.queue_id = place.queue_id AND queue_offset >= place.floor
                      ORDER BY queue_offset LIMIT %(batch)s) AS entry),
               place.floor) AS "limit"
    FROM place LEFT JOIN consumed USING (queue_id) LEFT JOIN LATERAL (
        SELECT queue_offset AS first, stored_at, queued_at
        FROM {schema}.consume_queue CROSS JOIN LATERAL (SELECT stored_at FROM {schema}.commit_log
                                                        WHERE commit_log.log_id = consume_queue.log_id OFFSET 0) AS log
        WHERE consume_queue.queue_id = place.queue_id AND queue_offset >= place.floor AND stored_at <= now()
        ORDER BY queue_offset LIMIT 1
    ) AS usual ON true
)
SELECT queue_id, floor, "limit", consumed, is_retry FROM bounded WHERE "limit" > floor ORDER BY queue_id
"""
)

# The groups that have not consumed a queue up to an offset.
_BEHIND: Final = Statement(
    """
SELECT topic.name AS topic, queue.number, ARRAY(
    SELECT consumer_group.name
    FROM {schema}.consumer_group
    LEFT JOIN LATERAL """
    + newest_offset("consumer_group.group_id", "queue.queue_id")
    + """ AS newest ON true
    WHERE NOT broadcast AND coalesce(newest.next_offset, 0) < %(limit)s
      AND (consumer_group.group_id = topic.retry_of
           OR EXISTS (SELECT FROM {schema}.subscription known
                      WHERE known.group_id = consumer_group.group_id AND known.topic_id = topic.topic_id))
    ORDER BY consumer_group.name) AS groups
FROM {schema}.queue JOIN {schema}.topic USING (topic_id) WHERE queue_id = %(queue_id)s
"""
)

# Delete the messages in `free`, and the rows that belong to their transactions.
_REMOVAL: Final = """
, messages AS (
    DELETE FROM {schema}.commit_log USING free WHERE commit_log.log_id = free.log_id
), checks AS (
    DELETE FROM {schema}.check_history USING free WHERE check_history.transaction_id = free.transaction_id
), pending AS (
    DELETE FROM {schema}.pending_check USING free WHERE pending_check.transaction_id = free.transaction_id
), decisions AS (
    DELETE FROM {schema}.op_log op
    WHERE op.transaction_id IN (SELECT transaction_id FROM free)
      AND NOT EXISTS (SELECT FROM unnest(op.log_ids) AS one (log_id) JOIN {schema}.commit_log log USING (log_id)
                      WHERE one.log_id NOT IN (SELECT log_id FROM free))
)
"""

# Retention keeps some messages below the floor: dead letters, and messages that wait for a retry or in a retry queue.
# The entries of these messages stay too, because an entry proves that its message was queued. Retention removes the
# entry of such a message later, together with the message. The statement reads waiting and dead messages once, and
# groups them with the rows of `candidate`. A join that is planned with old statistics would compare each message
# with each row of `candidate`. Without IS TRUE, PostgreSQL could plan the deletions of failures and dead letters as a
# join that compares all pairs of rows, too.
_FREE: Final = (
    """
, waiting AS (
    SELECT entry.log_id
    FROM {schema}.topic retry JOIN {schema}.queue USING (topic_id)
    CROSS JOIN LATERAL (
        SELECT greatest(queue.floor, coalesce((SELECT next_offset FROM """
    + newest_offset("retry.retry_of", "queue.queue_id")
    + """ AS newest), 0)) AS first) AS position
    CROSS JOIN LATERAL (SELECT log_id FROM {schema}.consume_queue
                        WHERE consume_queue.queue_id = queue.queue_id AND queue_offset >= position.first
                        OFFSET 0) AS entry
    WHERE retry.retry_of IS NOT NULL
), unkept AS MATERIALIZED (
    SELECT log_id, max(queue_id) AS queue_id, max(queue_offset) AS queue_offset
    FROM (SELECT log_id, queue_id, queue_offset FROM candidate
          UNION ALL SELECT log_id, NULL, NULL FROM waiting
          UNION ALL SELECT log_id, NULL, NULL FROM {schema}.dead_letter WHERE replayed_at IS NULL) AS known
    GROUP BY log_id HAVING every(queue_id IS NOT NULL)
), free AS MATERIALIZED (
    SELECT unkept.*, log.topic_id, log.transaction_id
    FROM unkept
    CROSS JOIN LATERAL (SELECT topic_id, transaction_id FROM {schema}.commit_log
                        WHERE commit_log.log_id = unkept.log_id OFFSET 0) AS log
    WHERE NOT EXISTS (SELECT FROM {schema}.scheduled WHERE scheduled.log_id = unkept.log_id OFFSET 0)
      AND NOT EXISTS (SELECT FROM {schema}.held WHERE held.log_id = unkept.log_id OFFSET 0)
    LIMIT %(batch)s
), entries AS (
    DELETE FROM {schema}.consume_queue USING free
    WHERE consume_queue.queue_id = free.queue_id AND consume_queue.queue_offset = free.queue_offset
), errors AS (
    DELETE FROM {schema}.failure WHERE (log_id IN (SELECT log_id FROM free)) IS TRUE
), letters AS (
    DELETE FROM {schema}.dead_letter WHERE (log_id IN (SELECT log_id FROM free)) IS TRUE
), recalled AS (
    DELETE FROM {schema}.recalled_retry USING free WHERE recalled_retry.log_id = free.log_id
), timed_out AS (
    DELETE FROM {schema}.timed_out USING free WHERE timed_out.log_id = free.log_id
)"""
    + _REMOVAL
    + """
, totals AS (
    INSERT INTO {schema}.pruned (topic_id, sent, committed, queued)
    SELECT topic_id, count(*), count(*), count(*) FROM free GROUP BY topic_id
)
"""
)

# Clear the given queues up to their limits, at most `batch` entries in all queues together.
_CLEAR: Final = Statement(
    """
WITH given AS (
    SELECT * FROM unnest(%(queue_ids)s::integer[], %(floors)s::bigint[], %(limits)s::bigint[])
        AS given (queue_id, floor, upper)
), candidate AS (
    SELECT given.queue_id, entry.queue_offset, entry.log_id
    FROM given
    CROSS JOIN LATERAL (SELECT queue_offset, log_id FROM {schema}.consume_queue
                        WHERE consume_queue.queue_id = given.queue_id
                          AND queue_offset >= given.floor AND queue_offset < given.upper OFFSET 0) AS entry
)"""
    + _FREE
    + """
, floor AS (
    UPDATE {schema}.queue SET floor = given.upper
    FROM given WHERE queue.queue_id = given.queue_id AND queue.floor < given.upper
)
SELECT count(*) FROM free
"""
)

# Some messages stay below the floor of their queue for a time (see `_FREE`). Clear each such message when its reason to
# stay has ended. The statement looks at all messages below the floors, so a message that must stay does not block later
# messages.
_CLEAR_KEPT: Final = Statement(
    """
WITH candidate AS (
    SELECT queue.queue_id, entry.queue_offset, entry.log_id
    FROM {schema}.queue
    CROSS JOIN LATERAL (SELECT queue_offset, log_id FROM {schema}.consume_queue
                        WHERE consume_queue.queue_id = queue.queue_id AND queue_offset < queue.floor
                        OFFSET 0) AS entry
)"""
    + _FREE
    + "SELECT count(*) FROM free"
)

_CLEAR_RETRY: Final = Statement("""
WITH entries AS (
    DELETE FROM {schema}.consume_queue
    WHERE queue_id = %(queue_id)s AND queue_offset >= %(first)s AND queue_offset < %(limit)s
    RETURNING 1
), floor AS (
    UPDATE {schema}.queue SET floor = %(limit)s WHERE queue_id = %(queue_id)s AND floor < %(limit)s
)
SELECT count(*) FROM entries
""")

# Clear the messages that were never queued, because they were rolled back or recalled before they were due. A topic may
# keep its messages for years, so a pass goes on for a limited time only, and the next one begins where it ended
# (`UnqueuedPlace`). The decision ROLLBACK of a message stays until the sequencer has read it, because the sequencer
# then unblocks the key of the message.
_CLEAR_UNQUEUED: Final = Statement(
    """
WITH rolled_back AS MATERIALIZED (
    SELECT transaction_id, log_ids, decided_at FROM {schema}.op_log
    WHERE decision = 'R' AND decided_at < now() AND decided_at > %(decided_at)s
      AND pg_visible_in_snapshot(xid, (SELECT snapshot FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1))
    ORDER BY decided_at FETCH FIRST %(batch)s ROWS WITH TIES
), taken_back AS MATERIALIZED (
    SELECT log_id FROM {schema}.recalled WHERE recalled_at < now() AND log_id > %(log_id)s
    ORDER BY log_id LIMIT %(batch)s
), ended AS (
    SELECT transaction_id, log_ids, 'R' AS what FROM rolled_back
    UNION ALL
    SELECT transaction_id, ARRAY[log_id], 'T' FROM taken_back JOIN {schema}.commit_log USING (log_id)
), free AS MATERIALIZED (
    SELECT log.log_id, log.topic_id, log.transaction_id, ended.what
    FROM ended CROSS JOIN LATERAL unnest(log_ids) AS one (log_id) JOIN {schema}.commit_log log USING (log_id)
    JOIN {schema}.topic USING (topic_id)
    WHERE log.stored_at < now() - make_interval(secs => topic.retention_seconds)
), recalls AS (
    DELETE FROM {schema}.recalled USING free WHERE recalled.log_id = free.log_id
)"""
    + _REMOVAL
    + """
, totals AS (
    INSERT INTO {schema}.pruned (topic_id, sent, committed, rolled_back, recalled)
    SELECT topic_id, count(*), count(*) FILTER (WHERE what = 'T'), count(*) FILTER (WHERE what = 'R'),
           count(*) FILTER (WHERE what = 'T')
    FROM free GROUP BY topic_id
)
SELECT (SELECT count(*) FROM free) AS removed,
       (SELECT max(decided_at) FROM rolled_back HAVING count(*) >= %(batch)s) AS decided_at,
       (SELECT max(log_id) FROM taken_back HAVING count(*) >= %(batch)s) AS log_id
"""
)

_MERGE_TOTALS: Final = Statement("""
WITH parts AS (
    DELETE FROM {schema}.pruned RETURNING *
)
INSERT INTO {schema}.pruned (topic_id, sent, committed, rolled_back, recalled, queued)
SELECT topic_id, sum(sent), sum(committed), sum(rolled_back), sum(recalled), sum(queued) FROM parts GROUP BY topic_id
""")

_TRIM_OFFSETS: Final = Statement("""
DELETE FROM {schema}.consumer_offset WHERE ctid = ANY (ARRAY(
    SELECT older.ctid FROM {schema}.consumer_offset older
    WHERE EXISTS (SELECT FROM {schema}.consumer_offset newer
                  WHERE newer.group_id = older.group_id AND newer.queue_id = older.queue_id
                    AND (newer.epoch, newer.ordinal) > (older.epoch, older.ordinal))
    LIMIT %(batch)s))
""")

_TRIM_TICKS: Final = Statement("""
DELETE FROM {schema}.tick WHERE tick_id = ANY (ARRAY(
    SELECT tick_id FROM {schema}.tick WHERE tick_id < (SELECT max(tick_id) FROM {schema}.tick WHERE is_full)
    ORDER BY tick_id LIMIT %(batch)s))
""")

_TRIM_SCANS: Final = Statement("""
DELETE FROM {schema}.half_scan WHERE scan_id < (SELECT max(scan_id) FROM {schema}.half_scan)
""")

_TRIM_INCIDENTS: Final = Statement("""
DELETE FROM {schema}.incident WHERE at < now() - make_interval(secs => %(keep)s)
""")


DEFAULT_HARD_CAP_SECONDS: Final = 30 * 24 * 3600.0
_INCIDENTS_KEEP_SECONDS: Final = 90 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """`hard_cap_seconds`: retention keeps an unconsumed message at least this long (seconds), and then removes it.

    Consumed messages are kept for their topic's `retention_seconds`. `batch` limits the rows of one statement.
    `unqueued_seconds`: a pass looks for messages that were never queued for about this time.
    """

    hard_cap_seconds: float = DEFAULT_HARD_CAP_SECONDS
    batch: int = 5_000
    unqueued_seconds: float = 2.0


_FIRST_TIME: Final = datetime.min.replace(tzinfo=UTC)
_LAST_TIME: Final = datetime.max.replace(tzinfo=UTC)
_LAST_ID: Final = 2**63 - 1


@dataclass(slots=True)
class UnqueuedPlace:
    """The place after which the next round looks for messages that were never queued.

    `decided_at`: the time of the last rollback that was seen. `log_id`: the last recalled message that was seen.
    """

    decided_at: datetime = _FIRST_TIME
    log_id: int = 0


@dataclass(frozen=True, slots=True)
class RetentionCounts:
    """The rows removed by one pass.

    `expired`: the number of removed messages that at least one group had not consumed. `more`: whether a batch was
    full, so that more rows may have to be removed.
    """

    messages: int = 0
    retries: int = 0
    unqueued: int = 0
    expired: int = 0
    offsets: int = 0
    ticks: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Limit:
    """The offset before which the entries of a queue may be cleared. `consumed` is None if no group reads the queue."""

    queue_id: int
    floor: int
    limit: int
    consumed: int | None
    is_retry: bool

    @property
    def entries(self) -> int:
        return self.limit - self.floor

    @property
    def expired(self) -> int:
        """The number of entries to clear that at least one group has not consumed."""
        return 0 if self.consumed is None else max(0, self.limit - max(self.floor, self.consumed))


def run_once(
    run: Executor, *, settings: RetentionSettings | None = None, place: UnqueuedPlace | None = None
) -> RetentionCounts:
    """Run one bounded pass over all queues, on an autocommit connection. Undecided and parked messages always stay.

    For a queue with nothing to remove, the pass reads only the oldest entry. Pass the same `place` to all passes of a
    process: each pass changes it.
    """
    settings = settings or RetentionSettings()
    batch = {"batch": settings.batch}
    # First remove the messages that stayed below the floor of their queue, and whose reason to stay has ended.
    [kept] = run.one(_CLEAR_KEPT, batch)
    limits = run.objects(_Limit, _LIMITS, batch | {"cap": settings.hard_cap_seconds})
    retries = sum(_clear_retries(run, limit) for limit in limits if limit.is_retry)
    messages = kept + sum(
        _clear(run, chunk, settings) for chunk in _chunks([one for one in limits if not one.is_retry], settings.batch)
    )
    for limit in limits:
        _report_expired(run, limit)
    unqueued = _clear_unqueued(run, settings, place or UnqueuedPlace())
    offsets = run.count(_TRIM_OFFSETS, batch)
    ticks = run.count(_TRIM_TICKS, batch)
    run.execute(_TRIM_SCANS)
    run.execute(_TRIM_INCIDENTS, {"keep": _INCIDENTS_KEEP_SECONDS})
    if unqueued or messages:
        run.execute(_MERGE_TOTALS)
    return RetentionCounts(
        messages=messages,
        retries=retries,
        expired=sum(limit.expired for limit in limits),
        unqueued=unqueued,
        offsets=offsets,
        ticks=ticks,
        more=any(limit.entries == settings.batch for limit in limits)
        or max(kept, unqueued, offsets, ticks) >= settings.batch,
    )


def _chunks(limits: Sequence[_Limit], batch: int) -> Iterator[list[_Limit]]:
    """Divide the queues into chunks, so that the queues of one chunk have at most `batch` entries to clear.

    One statement clears the queues of one chunk.
    """
    chunk: list[_Limit] = []
    for limit in limits:
        if chunk and sum(one.entries for one in chunk) + limit.entries > batch:
            yield chunk
            chunk = []
        chunk.append(limit)
    if chunk:
        yield chunk


def _clear(run: Executor, limits: Sequence[_Limit], settings: RetentionSettings) -> int:
    """Remove the entries before the limits of their queues, and the messages and other rows of these entries.

    Return the number of removed messages.
    """
    parameters = {
        "queue_ids": integers([limit.queue_id for limit in limits]),
        "floors": bigints([limit.floor for limit in limits]),
        "limits": bigints([limit.limit for limit in limits]),
        "batch": settings.batch,
    }
    return int(run.one(_CLEAR, parameters)[0])


def _clear_unqueued(run: Executor, settings: RetentionSettings, place: UnqueuedPlace) -> int:
    """Remove messages that were never queued, and move the place while batches are full. Return their number."""
    removed, ends_at = 0, time.monotonic() + settings.unqueued_seconds
    while True:
        values = {"batch": settings.batch, "decided_at": place.decided_at, "log_id": place.log_id}
        unqueued, decided_at, log_id = run.one(_CLEAR_UNQUEUED, values)
        removed += int(unqueued)
        if decided_at is None and log_id is None:
            # At the end of the rows, the next pass begins with the first one again.
            place.decided_at, place.log_id = _FIRST_TIME, 0
            return removed
        # One kind of rows may end before the other.
        place.decided_at, place.log_id = decided_at or _LAST_TIME, log_id or _LAST_ID
        if time.monotonic() >= ends_at:
            return removed


def _clear_retries(run: Executor, limit: _Limit) -> int:
    parameters = {"queue_id": limit.queue_id, "first": limit.floor, "limit": limit.limit}
    return int(run.one(_CLEAR_RETRY, parameters)[0])


def _report_expired(run: Executor, limit: _Limit) -> None:
    if not limit.expired:
        return
    topic, number, groups = run.one(_BEHIND, {"queue_id": limit.queue_id, "limit": limit.limit})
    detail = (
        f"{limit.expired} messages of queue {number} have expired: retention removed them at the hard cap, and "
        f"{', '.join(map(repr, groups)) or 'some group'} had not consumed them. Delete groups that no longer run "
        f"(outbox_group delete)."
    )
    incidents.record(run, [Incident(IncidentKind.EXPIRED, topic, detail)])
