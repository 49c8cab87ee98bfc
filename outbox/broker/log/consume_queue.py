"""Offsets of queues: the oldest offset (floor), the next offset (head), and the start offset of a new group.

A start at a time compares `queued_at` with it, and not the time at which a message was stored: a message that was
stored before this time and decided after it becomes visible only then, so the group gets it. The times of a queue only
rise, except when the server's clock is set back, so a binary search finds the first entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from outbox.broker.database.arrays import bigints, integers
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.subscription import Start

_HEADS = Statement("SELECT queue_id, head FROM {schema}.queue_head WHERE queue_id = ANY(%(queue_ids)s::integer[])")


def heads(run: Executor, queue_ids: Iterable[int]) -> dict[int, int]:
    """Return the next offset of each queue, also of one without entries, whose floor retention has raised."""
    return dict(run.rows(_HEADS, {"queue_ids": integers(list(queue_ids))}))


_FLOORS = Statement("SELECT queue_id, floor FROM {schema}.queue WHERE queue_id = ANY(%(queue_ids)s::integer[])")


def floors(run: Executor, queue_ids: Iterable[int]) -> dict[int, int]:
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
        return _queued_since(run, start, begins, ends)
    return ends


def _queued_since(run: Executor, time: datetime, begins: dict[int, int], ends: dict[int, int]) -> dict[int, int]:
    parameters = {
        "queue_ids": integers(list(begins)),
        "floors": bigints(list(begins.values())),
        "heads": bigints([ends[queue_id] for queue_id in begins]),
        "time": time,
    }
    return dict(run.rows(_QUEUED_SINCE, parameters))
