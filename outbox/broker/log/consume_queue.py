"""Where queues begin and end: their floors, their heads, and the offset at which a group starts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from outbox.broker.database.arrays import integers
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
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
    """The next offset of each queue. Retention raises a queue's floor with what it removes: rows and floor suffice."""
    return dict(run.rows(_HEADS, {"queue_ids": integers(list(queue_ids))}))


_FLOORS = Statement("SELECT queue_id, floor FROM {schema}.queue WHERE queue_id = ANY(%(queue_ids)s::integer[])")


def floors(run: Executor, queue_ids: Iterable[int]) -> dict[int, int]:
    """The oldest offset each queue still has."""
    return dict(run.rows(_FLOORS, {"queue_ids": integers(list(queue_ids))}))


_FLOORS_OF_TOPIC = Statement("SELECT queue_id, floor FROM {schema}.queue WHERE topic_id = %(topic_id)s")

# The lowest entry stored at or after the time: nothing younger is missed. Entries follow decisions, not storage
# times, so there is nothing to search by halving; an operator's rewind may read the topic once.
_AT_TIME = Statement("""
SELECT e.queue_id, min(e.queue_offset)
FROM {schema}.consume_queue e
JOIN {schema}.queue q USING (queue_id)
JOIN {schema}.commit_log l USING (log_id)
WHERE q.topic_id = %(topic_id)s AND l.stored_at >= %(time)s
GROUP BY e.queue_id
""")


def starting_offsets(run: Executor, topic_id: int, start: Start | datetime) -> dict[int, int]:
    """The offset by queue id at which a group that starts so begins, for the queues the topic has now."""
    begins: dict[int, int] = dict(run.rows(_FLOORS_OF_TOPIC, {"topic_id": topic_id}))
    if start is Start.EARLIEST:
        return begins
    ends = heads(run, begins)
    if isinstance(start, datetime):
        return {**ends, **dict(run.rows(_AT_TIME, {"topic_id": topic_id, "time": start}))}
    return ends
