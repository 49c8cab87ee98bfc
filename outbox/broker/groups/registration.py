"""Consumer groups: registering a subscription, switches an operator has, and how far a group is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from outbox.broker.database.arrays import bigints, cursor_on, integers
from outbox.broker.database.connection import Connection
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.dispatch.fetch import heads
from outbox.broker.log.topics import TopicCatalog
from outbox.errors import InvalidSubscription, UnknownGroup
from outbox.filters.filter import parse_filter
from outbox.subscription import Start, Subscription


@dataclass(frozen=True, slots=True)
class Registration:
    """What a subscription is in the broker. Broadcast groups have no retry queue."""

    group_id: int
    topic_id: int
    retry_queue_id: int | None


_ADD_GROUP = Statement("""
INSERT INTO {schema}.consumer_group (name, broadcast) VALUES (%(name)s, %(broadcast)s) ON CONFLICT (name) DO NOTHING
""")
_LOCK_GROUP = Statement("""
SELECT group_id, broadcast FROM {schema}.consumer_group WHERE name = %(name)s FOR NO KEY UPDATE
""")
_ADD_RETRY_TOPIC = Statement("""
INSERT INTO {schema}.topic (name, message_types, queue_count, retry_of)
VALUES ('%%RETRY%%' || %(name)s, ARRAY['NORMAL', 'DELAY'], 1, %(group_id)s)
ON CONFLICT (name) DO NOTHING
RETURNING topic_id
""")
_ADD_RETRY_QUEUE = Statement("""
INSERT INTO {schema}.queue (topic_id, number) VALUES (%(topic_id)s, 0) RETURNING queue_id
""")
_RETRY_QUEUE = Statement("""
SELECT q.queue_id FROM {schema}.queue q JOIN {schema}.topic t USING (topic_id) WHERE t.retry_of = %(group_id)s
""")
_SUBSCRIBE = Statement("""
INSERT INTO {schema}.subscription (group_id, topic_id, mode, filter)
VALUES (%(group_id)s, %(topic_id)s, %(mode)s, %(filter)s)
ON CONFLICT (group_id, topic_id) DO NOTHING
RETURNING true
""")
_SUBSCRIBED = Statement("""
SELECT mode, filter FROM {schema}.subscription WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s
""")
_CHANGE = Statement("""
UPDATE {schema}.subscription SET mode = %(mode)s, filter = %(filter)s
WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s
""")
_OTHERS = Statement("""
SELECT host, pid FROM {schema}.consumer
WHERE group_id = %(group_id)s AND %(topic)s = ANY(topics) AND expires_at > clock_timestamp()
  AND instance_id IS DISTINCT FROM %(instance)s
ORDER BY joined_at LIMIT 1
""")


def register(
    connection: Connection, schema: str, subscription: Subscription, *, instance: UUID | None = None
) -> Registration:
    """Make the subscription known, with its group, retry queue and first offsets; idempotent, one transaction.

    `instance` is the caller's own membership, which does not count as another. Raises InvalidFilter, UnknownTopic,
    and InvalidSubscription when a live instance of the group has subscribed to the topic in another way; a definition
    that only dead instances used is replaced.
    """
    parse_filter(subscription.filter)
    topic = TopicCatalog(schema).get(connection, subscription.topic)
    with connection.transaction(), cursor_on(connection) as cursor:
        values: dict[str, Any] = {
            "name": subscription.group,
            "broadcast": subscription.broadcast,
            "topic": subscription.topic,
            "topic_id": topic.topic_id,
            "mode": subscription.mode.value,
            "filter": subscription.filter,
            "instance": instance,
        }
        cursor.execute(_ADD_GROUP.on(schema), values)
        values["group_id"], broadcast = _one(cursor.execute(_LOCK_GROUP.on(schema), values).fetchone())
        if broadcast != subscription.broadcast:
            raise InvalidSubscription(
                f"group {subscription.group!r} is registered with broadcast={broadcast}: a group is one or the other "
                f"for good. Give this subscription to {subscription.topic!r} a group of its own."
            )
        retry_queue_id = None if broadcast else _retry_queue(connection, schema, values)
        if cursor.execute(_SUBSCRIBE.on(schema), values).fetchone() is None:
            _check_definition(connection, schema, subscription, values)
        elif not broadcast:
            starts = starting_offsets(connection, schema, topic.topic_id, subscription.start)
            store_starts(connection, schema, values["group_id"], starts)
    return Registration(values["group_id"], topic.topic_id, retry_queue_id)


def _retry_queue(connection: Connection, schema: str, values: dict[str, Any]) -> int:
    cursor = cursor_on(connection)
    created = cursor.execute(_ADD_RETRY_TOPIC.on(schema), values).fetchone()
    if created is None:
        return int(_one(cursor.execute(_RETRY_QUEUE.on(schema), values).fetchone())[0])
    queue_id = int(_one(cursor.execute(_ADD_RETRY_QUEUE.on(schema), {"topic_id": created[0]}).fetchone())[0])
    store_starts(connection, schema, values["group_id"], {queue_id: 0})
    return queue_id


def _check_definition(connection: Connection, schema: str, subscription: Subscription, values: dict[str, Any]) -> None:
    cursor = cursor_on(connection)
    mode, expression = _one(cursor.execute(_SUBSCRIBED.on(schema), values).fetchone())
    if (mode, expression) == (subscription.mode.value, subscription.filter):
        return
    other = cursor.execute(_OTHERS.on(schema), values).fetchone()
    if other is not None:
        raise InvalidSubscription(
            f"group {subscription.group!r} consumes {subscription.topic!r} with mode={mode!r} and "
            f"filter={expression!r} on {other[0]} (pid {other[1]}), but this process wants "
            f"mode={subscription.mode.value!r} and filter={subscription.filter!r}: all instances of a group need the "
            f"same. Stop the others first, or use another group."
        )
    cursor.execute(_CHANGE.on(schema), values)


def _one(row: tuple[Any, ...] | None) -> tuple[Any, ...]:
    assert row is not None
    return row


# -- where to begin ---------------------------------------------------------------------------------

_FLOORS = Statement("""
SELECT queue_id, floor FROM {schema}.queue WHERE topic_id = %(topic_id)s
""")

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

_STORE_STARTS = Statement("""
INSERT INTO {schema}.consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset)
SELECT %(group_id)s, queue_id, 0, 0, start, start
FROM unnest(%(queue_ids)s::integer[], %(starts)s::bigint[]) AS given (queue_id, start)
ON CONFLICT DO NOTHING
""")


def starting_offsets(connection: Connection, schema: str, topic_id: int, start: Start | datetime) -> dict[int, int]:
    """The offset by queue id at which a group that starts so begins, for the queues the topic has now."""
    cursor = cursor_on(connection)
    floors: dict[int, int] = dict(cursor.execute(_FLOORS.on(schema), {"topic_id": topic_id}).fetchall())
    if start is Start.EARLIEST:
        return floors
    ends = heads(connection, schema, floors)
    if isinstance(start, datetime):
        cursor.execute(_AT_TIME.on(schema), {"topic_id": topic_id, "time": start})
        return {**ends, **dict(cursor.fetchall())}
    return ends


def store_starts(connection: Connection, schema: str, group_id: int, starts: dict[int, int]) -> None:
    """Let a group that has no position on these queues begin here."""
    cursor_on(connection).execute(
        _STORE_STARTS.on(schema),
        {"group_id": group_id, "queue_ids": integers(list(starts)), "starts": bigints(list(starts.values()))},
    )


# -- switches ---------------------------------------------------------------------------------------

_PAUSE = Statement("UPDATE {schema}.consumer_group SET paused = %(paused)s WHERE name = %(name)s RETURNING group_id")
_RESUME_QUEUES = Statement("""
UPDATE {schema}.queue_lease SET stopped = NULL WHERE group_id = %(group_id)s AND stopped IS NOT NULL
""")
_RAISE_GENERATION = Statement("""
UPDATE {schema}.consumer_group SET generation = generation + 1 WHERE name = %(name)s RETURNING generation
""")


def group_id_of(connection: Connection, schema: str, group: str) -> int:
    """The id of a group. Raises UnknownGroup."""
    row = cursor_on(connection).execute(_LOCK_GROUP.on(schema), {"name": group}).fetchone()
    if row is None:
        raise _unknown(group)
    return int(row[0])


def pause(connection: Connection, schema: str, group: str) -> None:
    """Let the group start no more handlers, within a second or so; positions stay. Raises UnknownGroup."""
    if cursor_on(connection).execute(_PAUSE.on(schema), {"name": group, "paused": True}).fetchone() is None:
        raise _unknown(group)
    notify(connection, schema, Channel.SHARED)


def resume(connection: Connection, schema: str, group: str) -> int:
    """Undo `pause` and let queues go on that on_error=STOP stopped; returns how many. Raises UnknownGroup."""
    with connection.transaction(), cursor_on(connection) as cursor:
        row = cursor.execute(_PAUSE.on(schema), {"name": group, "paused": False}).fetchone()
        if row is None:
            raise _unknown(group)
        resumed = cursor.execute(_RESUME_QUEUES.on(schema), {"group_id": row[0]}).rowcount
    notify(connection, schema, Channel.SHARED)
    return resumed


def raise_generation(connection: Connection, schema: str, group: str) -> int:
    """Start a new inbox generation, so that messages the inbox knows are processed again; returns it."""
    row = cursor_on(connection).execute(_RAISE_GENERATION.on(schema), {"name": group}).fetchone()
    if row is None:
        raise _unknown(group)
    return int(row[0])


def _unknown(group: str) -> UnknownGroup:
    return UnknownGroup(
        f"the consumer group {group!r} is not known to the broker: check its name; a group is created when its first "
        f"consumer starts."
    )


# -- how far it is ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A group on one queue. `lag` counts entries from the offset to the end, running ones included.

    `blocked_by` is the id of the next message if an attempt at it failed, with its last error and since when.
    `owner` is None when nobody holds a live lease. `stopped` is the error that stopped the queue, if one did.
    """

    group: str
    topic: str
    generation: int
    number: int
    queue_id: int
    next_offset: int
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
        """Entries not finished."""
        return max(0, self.head - self.next_offset)


_STATUS = Statement("""
SELECT g.name, t.name, q.generation, q.number, q.queue_id, p.next_offset,
       greatest(q.floor, coalesce(newest.queue_offset + 1, 0)),
       CASE WHEN l.expires_at > clock_timestamp() THEN l.owner END, l.stopped,
       blocked.message_id, blocked.error, blocked.since,
       p.handled, p.filtered, p.skipped, p.sent_back, p.dead, p.expired
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
LEFT JOIN LATERAL (
    SELECT m.message_id, (array_agg(f.error ORDER BY f.attempt DESC))[1] AS error, min(f.failed_at) AS since
    FROM {schema}.consume_queue e
    JOIN {schema}.failure f ON f.group_id = g.group_id AND f.log_id = e.log_id
    JOIN {schema}.commit_log m ON m.log_id = e.log_id
    WHERE e.queue_id = q.queue_id AND e.queue_offset = p.next_offset AND t.retry_of IS NULL
    GROUP BY m.message_id
) AS blocked ON true
WHERE NOT g.broadcast AND (%(group)s::text IS NULL OR g.name = %(group)s)
ORDER BY g.name, t.retry_of NULLS FIRST, t.name, q.generation, q.number
""")


def list_queues(connection: Connection, schema: str, group: str | None = None) -> Sequence[QueueStatus]:
    """Every queue of one group or of all, retry queues last. Broadcast groups have no stored positions."""
    return [QueueStatus(*row) for row in cursor_on(connection).execute(_STATUS.on(schema), {"group": group})]
