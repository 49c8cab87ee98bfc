"""The progress of each consumer group on each queue. All SQL statements about lag and positions are in this module.

`list_queues` returns the queues of one group, for an operator. `GROUPS` sums the same figures per group and topic, for
the summary. The audit (`audit.py`) counts entry by entry, so that it can find an error in the figures of this module.
Retention (`maintenance/retention.py`) needs only the smallest position of each queue. All find the valid row of a
position with `groups/offsets.py::newest_offset`.

The lag includes the messages of running handlers, because the tables do not store which handlers run. A retry that
waits for its time is in no queue yet (`GroupRest.retrying`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final
from uuid import UUID

from outbox.broker.database.arrays import texts
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The progress of a group on one queue.

    The position of the group is `next_offset`, and the end of the queue is `head`. A retry queue's topic is
    `%RETRY%group/topic`. A change of the queue count starts a new `layout` of the topic's queues. `floor` is the oldest
    offset that the broker still has; unconsumed entries below it are `expired`.

    `lag` counts the entries from the position to the end of the queue, including the entries in running handlers.
    `oldest_at` is the time from which the entry at the position could be consumed. `queued` and the fields after it are
    totals from the start of the group. `handled` counts each entry whose message the group has done; `skipped` is the
    part of it that the inbox knew already, because the process had died before it stored the offset, because the
    message came back from its claim, or because a reset let the group read it again. `owner` is None if no process
    holds a live lease. If an error has stopped the queue, `stopped` is this error. If the queue is
    consumed in order and an attempt at its next message has failed, `blocked_by` is the id of this message,
    `blocked_error` its last error, and `blocked_since` the time of its first failure.
    """

    group: str
    topic: str
    is_retry: bool
    paused: bool
    layout: int
    number: int
    queue_id: int
    next_offset: int
    floor: int
    head: int
    lag: int
    oldest_at: datetime | None
    owner: UUID | None
    stopped: str | None
    blocked_by: UUID | None
    blocked_key: str | None
    blocked_error: str | None
    blocked_since: datetime | None
    queued: int
    handled: int
    filtered: int
    skipped: int
    sent_back: int
    dead: int
    expired: int


# The end of `queue`: the offset of its next entry.
END: Final = """
greatest(queue.floor, coalesce((SELECT queue_offset + 1 FROM {schema}.consume_queue entry
                                WHERE entry.queue_id = queue.queue_id ORDER BY queue_offset DESC LIMIT 1), 0))
"""

# All positions in one scan: with 200 topics and 20 groups, a look-up for each of the 32,000 pairs of group and queue
# takes several times as long.
EVERY: Final = f"""
newest AS MATERIALIZED (
    SELECT DISTINCT ON (group_id, queue_id) *
    FROM {{schema}}.consumer_offset
    ORDER BY group_id DESC, queue_id DESC, epoch DESC, ordinal DESC
), ends AS MATERIALIZED (
    SELECT queue_id, {END} AS head FROM {{schema}}.queue
)
"""
_OF_EVERY: Final = "JOIN ends USING (queue_id) LEFT JOIN newest USING (group_id, queue_id) WHERE NOT broadcast"

# The positions of some groups or topics, looked up one by one.
_OF_WANTED: Final = f"""
    CROSS JOIN LATERAL (SELECT {END} AS head OFFSET 0) AS ends
    LEFT JOIN LATERAL {newest_offset("place.group_id", "queue.queue_id")} AS newest ON true
    WHERE NOT broadcast AND (%(groups)s::text[] IS NULL OR consumer_group.name = ANY (%(groups)s::text[]))
      AND (%(topic)s::text IS NULL OR topic.name = %(topic)s OR retried.name = %(topic)s)
      AND (%(topics)s::text[] IS NULL OR topic.name = ANY (%(topics)s::text[]))
"""


def _progress(positions: str) -> str:
    """Return the CTE `progress` and the CTEs that it reads. `positions` joins `ends` and `newest`."""
    return f"""
place AS (
    SELECT group_id, topic_id, mode, false AS is_retry FROM {{schema}}.subscription
    UNION ALL
    SELECT retry_of, topic_id, 'concurrent', true FROM {{schema}}.topic WHERE retry_of IS NOT NULL
), pair AS (
    SELECT place.group_id, place.topic_id, place.mode, place.is_retry, consumer_group.name AS group,
           topic.name || coalesce('/' || retried.name, '') AS topic, consumer_group.paused,
           queue.layout, queue.number, queue.queue_id, queue.floor, ends.head,
           coalesce(newest.next_offset, 0) AS next_offset,
           greatest(coalesce(newest.next_offset, 0), queue.floor) AS first,
           ends.head - coalesce(newest.start_offset + newest.moved, 0) AS queued,
           coalesce(newest.handled + newest.skipped, 0) AS handled, coalesce(newest.filtered, 0) AS filtered,
           coalesce(newest.skipped, 0) AS skipped, coalesce(newest.sent_back, 0) AS sent_back,
           coalesce(newest.dead, 0) AS dead,
           coalesce(newest.expired, 0) + greatest(0, queue.floor - coalesce(newest.next_offset, 0)) AS expired,
           CASE WHEN lease.expires_at > statement_timestamp() THEN lease.owner END AS owner, lease.stopped
    FROM place JOIN {{schema}}.consumer_group USING (group_id) JOIN {{schema}}.topic USING (topic_id)
    JOIN {{schema}}.queue USING (topic_id)
    LEFT JOIN {{schema}}.queue_lease lease USING (group_id, queue_id)
    LEFT JOIN {{schema}}.topic retried ON place.is_retry AND retried.topic_id = queue.number
    {positions}
), progress AS (
    SELECT pair.*, greatest(0, head - pair.first) AS lag, oldest_at, coalesce(blocked, false) AS blocked,
           CASE WHEN blocked THEN message_id END AS blocked_by, CASE WHEN blocked THEN key END AS blocked_key,
           CASE WHEN blocked THEN error END AS blocked_error, CASE WHEN blocked THEN since END AS blocked_since
    -- Look-ups for each pair: a join of two lists of 32,000 pairs is planned as a nested loop, which takes minutes.
    FROM pair LEFT JOIN LATERAL (
        -- After a send-back it could be consumed again only later. If it fails in place, it waits since it was queued.
        SELECT greatest(log.stored_at, log.deliver_at, op.decided_at, CASE WHEN is_retry THEN failed.newest END)
                   AS oldest_at,
               NOT is_retry AND mode <> 'concurrent' AND failed.newest IS NOT NULL AS blocked,
               log.message_id, log.key, failed.since, failed.error
        FROM (SELECT log_id FROM {{schema}}.consume_queue entry
              WHERE entry.queue_id = pair.queue_id AND queue_offset >= pair.first
                AND pair.head > pair.first  -- here, so that nothing is read of a queue in which nothing waits
              ORDER BY queue_offset LIMIT 1) AS first
        -- OFFSET 0: one look-up by key each, regardless of the statistics of fast-growing tables.
        CROSS JOIN LATERAL (SELECT half, transaction_id, stored_at, deliver_at, message_id, key
                            FROM {{schema}}.commit_log WHERE log_id = first.log_id OFFSET 0) AS log
        LEFT JOIN LATERAL (SELECT decided_at FROM {{schema}}.op_log
                           WHERE log.half AND transaction_id = log.transaction_id OFFSET 0) AS op ON true
        LEFT JOIN LATERAL (SELECT max(failed_at) AS newest, min(failed_at) AS since,
                                  (array_agg(error ORDER BY attempt DESC))[1] AS error
                           FROM {{schema}}.failure
                           WHERE (mode <> 'concurrent' OR is_retry) AND failure.group_id = pair.group_id
                             AND failure.log_id = first.log_id) AS failed ON true
    ) AS waiting ON true
)
"""


# The figures per group and topic; the retry queues of a group have a separate row. The statement around it has the CTEs
# of `EVERY`.
GROUPS: Final = f"""WITH {_progress(_OF_EVERY)}
SELECT progress.group, topic.name AS topic, progress.is_retry, progress.paused, count(*) AS queues,
       sum(lag)::bigint AS lag, extract(epoch FROM min(oldest_at))::double precision AS oldest_at,
       sum(queued)::bigint AS queued, sum(handled)::bigint AS handled, sum(filtered)::bigint AS filtered,
       sum(skipped)::bigint AS skipped, sum(sent_back)::bigint AS sent_back, sum(dead)::bigint AS dead,
       sum(expired)::bigint AS expired, count(*) FILTER (WHERE blocked) AS blocked, count(stopped) AS stopped
FROM progress JOIN {{schema}}.topic USING (topic_id)
GROUP BY progress.group, topic.topic_id, progress.is_retry, progress.paused
ORDER BY progress.group, progress.is_retry, topic.name
"""

_COLUMNS: Final = f"SELECT {', '.join(f'progress.{one.name}' for one in fields(QueueProgress))} FROM progress\n"
_QUEUES: Final = Statement(
    "WITH " + _progress(_OF_WANTED) + _COLUMNS + "ORDER BY progress.group, is_retry, topic, layout, number"
)
_BLOCKED: Final = Statement(
    "WITH " + _progress(_OF_WANTED) + _COLUMNS + "WHERE blocked ORDER BY blocked_since LIMIT %(limit)s"
)


def list_queues(run: Executor, group: str | None = None, topic: str | None = None) -> Sequence[QueueProgress]:
    """Return the queues of a group and topic; None means all groups or topics. A topic's retry queues come last.

    Broadcast groups have no stored positions.
    """
    return run.objects(QueueProgress, _QUEUES, {"groups": group and texts([group]), "topic": topic, "topics": None})


def list_blocked(run: Executor, groups: Sequence[str], topics: Sequence[str], *, limit: int) -> Sequence[QueueProgress]:
    """Return the queues of these groups and topics whose next message has failed, the one blocked longest first."""
    values = {"groups": texts(groups), "topic": None, "topics": texts(topics), "limit": limit}
    return run.objects(QueueProgress, _BLOCKED, values)


# ---------------------------------------------------------------------------------------------------------------------
# Consumer groups that are about to start on a topic that already has messages.

# Only offsets are read, so the time does not depend on the number of messages.
_NEWCOMERS = Statement(f"""
WITH wanted AS (
    SELECT given.consumer_group, topic.topic_id, topic.name
    FROM unnest(%(groups)s::text[], %(topics)s::text[]) AS given (consumer_group, topic)
    JOIN {{schema}}.topic ON topic.name = given.topic
    WHERE NOT EXISTS (SELECT FROM {{schema}}.subscription known JOIN {{schema}}.consumer_group USING (group_id)
                      WHERE known.topic_id = topic.topic_id AND consumer_group.name = given.consumer_group)
), handled AS (
    SELECT of_topic.topic_id, consumer_group.name,
           EXISTS (SELECT FROM {{schema}}.consumer
                   WHERE consumer.group_id = consumer_group.group_id AND expires_at > clock_timestamp()) AS is_alive
    FROM (SELECT DISTINCT topic_id FROM wanted) AS of_topic
    JOIN {{schema}}.subscription USING (topic_id) JOIN {{schema}}.consumer_group USING (group_id)
    WHERE EXISTS (
        SELECT FROM {{schema}}.queue
        CROSS JOIN LATERAL {newest_offset("consumer_group.group_id", "queue.queue_id")} AS position
        WHERE queue.topic_id = of_topic.topic_id
          AND position.next_offset > greatest(queue.floor, position.start_offset))
)
SELECT wanted.consumer_group AS group, wanted.name AS topic,
       (SELECT coalesce(sum(newest.queue_offset + 1 - queue.floor), 0)::bigint
        FROM {{schema}}.queue
        CROSS JOIN LATERAL (SELECT queue_offset FROM {{schema}}.consume_queue entry
                            WHERE entry.queue_id = queue.queue_id AND entry.queue_offset >= queue.floor
                            ORDER BY queue_offset DESC LIMIT 1) AS newest
        WHERE queue.topic_id = wanted.topic_id) AS messages,
       array_agg(handled.name ORDER BY handled.name) AS handled_by,
       coalesce(array_agg(handled.name ORDER BY handled.name) FILTER (WHERE NOT is_alive), '{{{{}}}}')
           AS without_consumers
FROM wanted JOIN handled USING (topic_id)
GROUP BY wanted.consumer_group, wanted.name, wanted.topic_id
ORDER BY wanted.consumer_group, wanted.name
""")


def newcomers(run: Executor, wanted: Sequence[tuple[str, str]]) -> list[Row]:
    """Return the pairs (group, topic) of `wanted` in which the group has no subscription to the topic.

    The queues of the topic have about `messages` messages, of which the groups `handled_by` have handled some. No
    consumer of the groups `without_consumers` among them is alive. Pairs are left out if no group has handled messages.
    """
    if not wanted:
        return []
    groups, topics = zip(*wanted, strict=True)
    return run.objects(Row, _NEWCOMERS, {"groups": texts(list(groups)), "topics": texts(list(topics))})
