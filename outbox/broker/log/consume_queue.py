"""Offsets of queues: the oldest offset (floor), the next offset (head), and the start offset of a new group."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.fastpath.arrays import bigints, integers
from outbox.subscription import Start

_HEADS = Statement("""
SELECT q.queue_id, greatest(q.floor, coalesce(newest.queue_offset + 1, 0))
FROM {schema}.queue q
LEFT JOIN LATERAL (
    SELECT e.queue_offset FROM {schema}.consume_queue e WHERE e.queue_id = q.queue_id
    ORDER BY e.queue_offset DESC LIMIT 1
) AS newest ON true
WHERE q.queue_id = ANY(%(queue_ids)s::integer[])
""")


def heads(run: Executor, queue_ids: Iterable[int]) -> dict[int, int]:
    """Return the next offset of each queue, from its rows and its floor.

    Retention raises the floor of a queue when it removes rows. So the returned offset is also right for a queue without
    rows.
    """
    return dict(run.rows(_HEADS, {"queue_ids": integers(list(queue_ids))}))


_FLOORS = Statement("SELECT queue_id, floor FROM {schema}.queue WHERE queue_id = ANY(%(queue_ids)s::integer[])")


def floors(run: Executor, queue_ids: Iterable[int]) -> dict[int, int]:
    """Return the oldest offset that each queue still has."""
    return dict(run.rows(_FLOORS, {"queue_ids": integers(list(queue_ids))}))


_FLOORS_OF_TOPIC = Statement("SELECT queue_id, floor FROM {schema}.queue WHERE topic_id = %(topic_id)s")

# A binary search between floor and head for the first entry that was queued at or after `time`. Entries are queued in
# the order of their offsets, and there are no gaps from the floor on. If retention has just removed an entry, the
# search counts this entry as queued before `time`.
_QUEUED_SINCE = Statement("""
WITH RECURSIVE search (queue_id, low, high) AS (
    SELECT queue_id, low, high
    FROM unnest(%(queue_ids)s::integer[], %(floors)s::bigint[], %(heads)s::bigint[]) AS given (queue_id, low, high)
    UNION ALL
    SELECT queue_id, CASE WHEN is_before THEN middle + 1 ELSE low END, CASE WHEN is_before THEN high ELSE middle END
    FROM (
        SELECT queue_id, low, high, middle,
               coalesce((SELECT queued_at < %(time)s FROM {schema}.consume_queue entry
                         WHERE entry.queue_id = search.queue_id AND entry.queue_offset = middle), true) AS is_before
        FROM search CROSS JOIN LATERAL (SELECT (low + high) / 2 AS middle) AS half
        WHERE low < high
    ) AS step
)
SELECT queue_id, low FROM search WHERE low >= high
""")

# Entries that were stored before the column queued_at existed have no time of queueing. For an entry without this time,
# use the earliest moment at which it can have been queued. These estimated times do not follow the order of the
# entries, so the statement reads all entries without a time of queueing. Retention removes these old entries sooner or
# later.
_OLD_SINCE = Statement("""
SELECT entry.queue_id, min(entry.queue_offset)
FROM {schema}.consume_queue entry
JOIN {schema}.queue USING (queue_id)
JOIN {schema}.commit_log log USING (log_id)
LEFT JOIN {schema}.op_log op USING (transaction_id)
WHERE queue.topic_id = %(topic_id)s AND entry.queued_at IS NULL AND entry.queue_offset >= queue.floor
  AND greatest(log.stored_at, log.deliver_at, op.decided_at) >= %(time)s
GROUP BY entry.queue_id
""")
_HAS_OLD = Statement("""
SELECT true FROM {schema}.queue
WHERE topic_id = %(topic_id)s
  AND EXISTS (SELECT FROM {schema}.consume_queue entry
              WHERE entry.queue_id = queue.queue_id AND entry.queue_offset = queue.floor AND entry.queued_at IS NULL)
LIMIT 1
""")


def starting_offsets(run: Executor, topic_id: int, start: Start | datetime) -> dict[int, int]:
    """Return the start offset of a new group by queue id, for the queues that the topic has now.

    A start time is compared with the time at which each message was queued. The group receives every message that
    became visible to consumers at or after the start time. The message may have been stored much earlier, if it was
    delayed, decided late or held.
    """
    begins: dict[int, int] = dict(run.rows(_FLOORS_OF_TOPIC, {"topic_id": topic_id}))
    if start is Start.EARLIEST:
        return begins
    ends = heads(run, begins)
    if isinstance(start, datetime):
        return _queued_since(run, topic_id, start, begins, ends)
    return ends


def _queued_since(
    run: Executor, topic_id: int, time: datetime, begins: dict[int, int], ends: dict[int, int]
) -> dict[int, int]:
    parameters = {
        "queue_ids": integers(list(begins)),
        "floors": bigints(list(begins.values())),
        "heads": bigints([ends[queue_id] for queue_id in begins]),
        "time": time,
    }
    found: dict[int, int] = dict(run.rows(_QUEUED_SINCE, parameters))
    of_topic = {"topic_id": topic_id, "time": time}
    if run.row(_HAS_OLD, of_topic) is not None:
        found |= run.rows(_OLD_SINCE, of_topic)
    return found
