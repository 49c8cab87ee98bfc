"""Positions of consumer groups: queue by queue, with the reasons that block them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A group on one queue. `lag` counts entries from the offset to the end, running ones included.

    A retry queue's topic is `%RETRY%group/topic`. `layout` is the topic's generation: a change of its queue count
    starts another. `floor` is the oldest offset that the broker still has; unconsumed entries below it are `expired`.
    `blocked_by` is the id of the next message if an attempt at it failed, with its last error and the time since then.
    `owner` is None if no process holds a live lease. `stopped` is the error that stopped the queue, if one did.
    """

    group: str
    topic: str
    layout: int
    number: int
    queue_id: int
    next_offset: int
    floor: int
    head: int
    owner: UUID | None
    stopped: str | None
    blocked_by: UUID | None
    blocked_error: str | None
    blocked_since: datetime | None
    handled: int
    filtered: int
    skipped: int
    sent_back: int
    dead: int
    expired: int

    @property
    def lag(self) -> int:
        """The number of unfinished entries. Entries that retention removed count as expired."""
        return max(0, self.head - max(self.next_offset, self.floor))


_STATUS = Statement("""
SELECT g.name AS group, t.name || coalesce('/' || retried.name, '') AS topic, q.generation AS layout, q.number,
       q.queue_id, p.next_offset, q.floor,
       greatest(q.floor, coalesce(newest.queue_offset + 1, 0)) AS head,
       CASE WHEN l.expires_at > clock_timestamp() THEN l.owner END AS owner, l.stopped,
       blocked.message_id AS blocked_by, blocked.error AS blocked_error, blocked.since AS blocked_since,
       p.handled, p.filtered, p.skipped, p.sent_back, p.dead,
       p.expired + greatest(0, q.floor - p.next_offset) AS expired
FROM {schema}.consumer_group g
JOIN (
    SELECT group_id, topic_id FROM {schema}.subscription
    UNION ALL
    SELECT retry_of, topic_id FROM {schema}.topic WHERE retry_of IS NOT NULL
) AS s USING (group_id)
JOIN {schema}.topic t USING (topic_id)
JOIN {schema}.queue q USING (topic_id)
CROSS JOIN LATERAL (
    SELECT coalesce(max(o.next_offset), 0) AS next_offset, coalesce(max(o.handled), 0) AS handled,
           coalesce(max(o.filtered), 0) AS filtered, coalesce(max(o.skipped), 0) AS skipped,
           coalesce(max(o.sent_back), 0) AS sent_back, coalesce(max(o.dead), 0) AS dead,
           coalesce(max(o.expired), 0) AS expired
    FROM (
        SELECT * FROM {schema}.consumer_offset o
        WHERE o.group_id = g.group_id AND o.queue_id = q.queue_id
        ORDER BY o.epoch DESC, o.ordinal DESC LIMIT 1
    ) AS o
) AS p
LEFT JOIN LATERAL (
    SELECT e.queue_offset FROM {schema}.consume_queue e WHERE e.queue_id = q.queue_id
    ORDER BY e.queue_offset DESC LIMIT 1
) AS newest ON true
LEFT JOIN {schema}.queue_lease l ON l.group_id = g.group_id AND l.queue_id = q.queue_id
LEFT JOIN {schema}.topic retried ON t.retry_of IS NOT NULL AND retried.topic_id = q.number
LEFT JOIN LATERAL (
    SELECT m.message_id, (array_agg(f.error ORDER BY f.attempt DESC))[1] AS error, min(f.failed_at) AS since
    FROM {schema}.consume_queue e
    JOIN {schema}.failure f ON f.group_id = g.group_id AND f.log_id = e.log_id
    JOIN {schema}.commit_log m ON m.log_id = e.log_id
    WHERE e.queue_id = q.queue_id AND e.queue_offset = greatest(p.next_offset, q.floor) AND t.retry_of IS NULL
    GROUP BY m.message_id
) AS blocked ON true
WHERE NOT g.broadcast AND (%(group)s::text IS NULL OR g.name = %(group)s)
  AND (%(topic)s::text IS NULL OR t.name = %(topic)s OR retried.name = %(topic)s)
ORDER BY g.name, t.retry_of NULLS FIRST, t.name, q.generation, q.number
""")


def list_queues(run: Executor, group: str | None = None, topic: str | None = None) -> Sequence[QueueStatus]:
    """Return every queue of one group or of all, of one topic (with its retries) or of all; retry queues last.

    Broadcast groups have no stored positions.
    """
    return run.objects(QueueStatus, _STATUS, {"group": group, "topic": topic})
