"""Register a subscription with its group and its start position, and make the group's retry queues.

A group has one retry queue per topic, because the retries of a topic need a process that subscribes to it. It is made
when a message of the topic fails for the first time. The retry queues belong to the retry topic of the group, and the
number of a retry queue is the id of the topic that it serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox import hooks
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups import offsets
from outbox.broker.log import consume_queue
from outbox.broker.log.topics import TopicCatalog
from outbox.errors import InconsistentSubscription, InvalidSubscription, UnknownGroup
from outbox.filters.filter import parse_filter
from outbox.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Registration:
    """A subscription as the broker stores it."""

    group_id: int
    topic_id: int


_ADD_GROUP = Statement("""
INSERT INTO {schema}.consumer_group (name, broadcast) VALUES (%(name)s, %(broadcast)s) ON CONFLICT (name) DO NOTHING
""")
_LOCK_GROUP = Statement("""
SELECT group_id, broadcast FROM {schema}.consumer_group WHERE name = %(name)s FOR NO KEY UPDATE
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


def register(run: Executor, subscription: Subscription, *, instance: UUID | None = None) -> Registration:
    """Register a subscription with its group and its first offsets, in one idempotent transaction.

    `instance` is the id of the caller. Raises InvalidFilter and UnknownTopic, InconsistentSubscription if another live
    instance of the group uses another mode or filter for the topic, and InvalidSubscription if the group is stored with
    another value of `broadcast`. If no other live instance uses the stored mode and filter, the new ones replace them.
    """
    parse_filter(subscription.filter)
    topic = TopicCatalog(run.schema).get(run.connection, subscription.topic)
    with run.connection.transaction():
        values: dict[str, Any] = {
            "name": subscription.group,
            "broadcast": subscription.broadcast,
            "topic": subscription.topic,
            "topic_id": topic.topic_id,
            "mode": subscription.mode.value,
            "filter": subscription.filter,
            "instance": instance,
        }
        values["group_id"], broadcast = _added_and_locked(run, values)
        if broadcast != subscription.broadcast:
            raise InvalidSubscription(
                f"group {subscription.group!r} is registered with broadcast={broadcast}, and a group cannot "
                f"change its `broadcast`. Give this subscription to {subscription.topic!r} a group of its own."
            )
        if run.row(_SUBSCRIBE, values) is None:
            mode, expression = run.one(_SUBSCRIBED, values)
            if (mode, expression) != (subscription.mode.value, subscription.filter):
                _change(run, subscription, mode, expression, values)
        elif not broadcast:
            starts = consume_queue.starting_offsets(run, topic.topic_id, subscription.start)
            offsets.store_starts(run, values["group_id"], starts)
        key = values["group_id"], topic.topic_id
        for rows in hooks.subscription_rows.values():
            if rows.registered is not None:
                hooks.resolved(rows.registered)(run, key, subscription)
    return Registration(values["group_id"], topic.topic_id)


def _added_and_locked(run: Executor, values: dict[str, Any]) -> tuple[Any, ...]:
    while True:
        run.execute(_ADD_GROUP, values)
        # The row is None if the group existed, but was deleted while this transaction waited for the row.
        if (row := run.row(_LOCK_GROUP, values)) is not None:
            return row


def _change(run: Executor, subscription: Subscription, mode: str, expression: str, values: dict[str, Any]) -> None:
    other = run.row(_OTHERS, values)
    if other is not None:
        raise InconsistentSubscription(
            f"group {subscription.group!r} consumes {subscription.topic!r} with mode={mode!r} and "
            f"filter={expression!r} on {other[0]} (pid {other[1]}), but this process wants "
            f"mode={subscription.mode.value!r} and filter={subscription.filter!r}: all instances of a group need the "
            f"same mode and filter. A worker waits until the others have ended: end them, or use another group."
        )
    run.execute(_CHANGE, values)


def group_id_of(run: Executor, group: str) -> int:
    """Return the id of a group and lock its row until the transaction ends. Raises UnknownGroup."""
    row = run.row(_LOCK_GROUP, {"name": group})
    if row is None:
        raise unknown_group(group)
    return int(row[0])


def unknown_group(group: str) -> UnknownGroup:
    """Return the error for a group that no consumer has registered."""
    return UnknownGroup(
        f"the consumer group {group!r} is not known to the broker: check its name; a group is created when its first "
        f"consumer starts."
    )


# Only one process at a time makes queues of a group or registers with it; the others wait for the lock on this row.
_GROUP_NAME = Statement("SELECT name FROM {schema}.consumer_group WHERE group_id = %(group_id)s FOR NO KEY UPDATE")
_ADD_RETRY_TOPIC = Statement("""
INSERT INTO {schema}.topic (name, message_types, queue_count, retry_of)
VALUES ('%%RETRY%%' || %(name)s, ARRAY['NORMAL', 'DELAY'], 1, %(group_id)s)
ON CONFLICT (name) DO NOTHING
""")
_ADD_RETRY_QUEUE = Statement("""
INSERT INTO {schema}.queue (topic_id, number)
SELECT topic_id, %(of_topic)s FROM {schema}.topic WHERE retry_of = %(group_id)s
ON CONFLICT (topic_id, layout, number) DO NOTHING
RETURNING queue_id
""")
_FIND_RETRY_QUEUE = Statement("""
SELECT queue.queue_id FROM {schema}.queue JOIN {schema}.topic USING (topic_id)
WHERE topic.retry_of = %(group_id)s AND queue.number = %(of_topic)s
""")


def ensure_retry_queue(run: Executor, group_id: int, topic_id: int) -> int:
    """Return the id of a group's retry queue for a topic. Make the queue if there is none.

    Raises UnknownGroup if the group was deleted meanwhile.
    """
    values = {"group_id": group_id, "of_topic": topic_id}
    found = run.row(_FIND_RETRY_QUEUE, values)
    if found is not None:
        return int(found[0])
    with run.connection.transaction():
        group = run.row(_GROUP_NAME, values)
        if group is None:
            raise UnknownGroup(f"consumer group {group_id} was deleted: restart its consumers.")
        run.execute(_ADD_RETRY_TOPIC, {"name": group[0], "group_id": group_id})
        made = run.row(_ADD_RETRY_QUEUE, values)
        if made is None:
            return int(run.one(_FIND_RETRY_QUEUE, values)[0])
        offsets.store_starts(run, group_id, {made[0]: 0})
        return int(made[0])
