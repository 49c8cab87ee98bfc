"""Delete a consumer group, its subscription to one topic, or a topic.

No consumer of the group or topic may run during the deletion. The deletion raises an error if a consumer is alive, and
a starting consumer waits for the lock on the group's row. The deletion first counts the messages that will be lost. A
dry run executes the same statements and rolls them back.

The deletion of a topic only marks the topic's row. Rows of the log have no foreign key to topics, because it would lock
the topic's row in each publish call, and a publishing process may know the topic for 30 s more. The inbox rows of a
deleted group stay until they are pruned, so a new group with its name skips what the deleted group has handled in its
first generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import sql

from outbox import hooks
from outbox.broker.database.arrays import integers
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset
from outbox.broker.groups.registration import group_id_of
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.progress import list_queues
from outbox.errors import UsageError
from outbox.message import Message


@dataclass(frozen=True, slots=True)
class Loss:
    """The numbers of messages that a group loses with its subscription to a topic: unconsumed, retried, and dead."""

    group: str
    topic: str
    lag: int
    retrying: int
    dead: int


@dataclass(frozen=True, slots=True)
class TopicLoss:
    """The data that is deleted with a topic: the loss per group, and the number of messages that are in no queue."""

    topic: str
    undelivered: int
    groups: list[Loss]


_LIVE = Statement("""
SELECT g.name, c.host, c.pid FROM {schema}.consumer c JOIN {schema}.consumer_group g USING (group_id)
WHERE c.expires_at > clock_timestamp()
  AND (%(group_id)s::integer IS NULL OR c.group_id = %(group_id)s::integer)
  AND (%(topic)s::text IS NULL OR %(topic)s::text = ANY (c.topics))
ORDER BY c.joined_at
""")
_SUBSCRIBED = Statement("""
SELECT t.topic_id, t.name FROM {schema}.subscription s JOIN {schema}.topic t USING (topic_id)
WHERE s.group_id = %(group_id)s ORDER BY t.name
""")
_RETRYING = Statement(f"""
WITH retry_queue AS (
    SELECT queue_id, coalesce((SELECT next_offset FROM {newest_offset("%(group_id)s", "queue.queue_id")} AS newest), 0)
               AS next_offset
    FROM {{schema}}.queue JOIN {{schema}}.topic USING (topic_id) WHERE retry_of = %(group_id)s
), waiting AS (
    SELECT log_id FROM {{schema}}.scheduled JOIN retry_queue USING (queue_id)
    UNION ALL
    SELECT entry.log_id FROM {{schema}}.consume_queue entry JOIN retry_queue USING (queue_id)
    WHERE entry.queue_offset >= retry_queue.next_offset
)
SELECT count(*) FROM waiting JOIN {{schema}}.commit_log USING (log_id) WHERE topic_id = %(topic_id)s
""")
_DEAD = Statement("""
SELECT count(*) FROM {schema}.dead_letter JOIN {schema}.commit_log USING (log_id)
WHERE group_id = %(group_id)s AND replayed_at IS NULL AND topic_id = %(topic_id)s
""")
_UNDELIVERED = Statement("""
SELECT (SELECT count(*) FROM {schema}.held WHERE topic_id = %(topic_id)s)
     + (SELECT count(*) FROM {schema}.scheduled JOIN {schema}.commit_log USING (log_id)
        WHERE queue_id IS NULL AND topic_id = %(topic_id)s)
     + (SELECT count(*) FROM {schema}.pending_check pending JOIN {schema}.commit_log log USING (log_id)
        WHERE log.topic_id = %(topic_id)s
          AND NOT EXISTS (SELECT FROM {schema}.op_log op WHERE op.transaction_id = pending.transaction_id))
""")

_RETRY_QUEUES = Statement("""
SELECT queue_id FROM {schema}.queue JOIN {schema}.topic USING (topic_id)
WHERE retry_of = %(group_id)s AND number = %(topic_id)s
""")


def _of_queues(table: LiteralString) -> Statement:
    """Delete a group's rows about the queues of a topic, and about its retry queues."""
    return Statement(f"""
DELETE FROM {{schema}}.{table} WHERE group_id = %(group_id)s
  AND queue_id IN (SELECT queue_id FROM {{schema}}.queue WHERE topic_id = %(topic_id)s
                   UNION ALL SELECT unnest(%(retry_queues)s::integer[]))
""")


def _of_messages(table: LiteralString) -> Statement:
    """Delete a group's rows about the messages of a topic."""
    return Statement(f"""
DELETE FROM {{schema}}.{table} USING {{schema}}.commit_log log
WHERE {table}.group_id = %(group_id)s AND log.log_id = {table}.log_id AND log.topic_id = %(topic_id)s
""")


def _in_retry_queues(table: LiteralString) -> Statement:
    """Delete the rows of a group's retry queues of a topic."""
    return Statement(f"DELETE FROM {{schema}}.{table} WHERE queue_id = ANY (%(retry_queues)s::integer[])")


# At the same time, a tick may replace rows of `scheduled` by entries. Its DELETE waits for the tick, and that of
# `consume_queue` sees the new entries.
_FORGET: Final = [
    _of_messages("quarantined_message"),
    _of_queues("queue_lease"),
    *map(_in_retry_queues, ("scheduled", "consume_queue")),
    *map(_of_queues, ("consumer_offset", "finished_ahead")),
    *map(_of_messages, ("dead_letter", "failure", "timed_out")),
    _in_retry_queues("queue"),
    Statement("DELETE FROM {schema}.subscription WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s"),
]


_IN_RETRY_QUEUES: Final = """
queue_id IN (SELECT queue_id FROM {schema}.queue JOIN {schema}.topic USING (topic_id) WHERE retry_of = %(group_id)s)
"""
# Also the rows of topics to which the group does not subscribe any more. Messages in quarantine are locked before
# leases, and leases before offsets, as in all other transactions (docs/maintainers/storage.md, Locks).
_FORGET_GROUP: Final = [
    Statement(f"DELETE FROM {{schema}}.{table} WHERE {condition}")
    for condition, tables in (
        ("group_id = %(group_id)s", ("quarantined_message", "queue_lease")),
        (_IN_RETRY_QUEUES, ("scheduled", "consume_queue", "queue")),
        ("group_id = %(group_id)s", ("dead_letter", "failure", "timed_out", "consumer_offset", "consumer")),
        ("retry_of = %(group_id)s", ("topic",)),
        ("group_id = %(group_id)s", ("consumer_group",)),
    )
    for table in tables
]
_LOCK_TOPIC = Statement("SELECT topic_id FROM {schema}.topic WHERE topic_id = %(topic_id)s FOR UPDATE")
_GROUPS_OF = Statement("""
SELECT g.name FROM {schema}.subscription s JOIN {schema}.consumer_group g USING (group_id)
WHERE s.topic_id = %(topic_id)s ORDER BY g.name
""")
_MARK = Statement("UPDATE {schema}.topic SET deleted_at = now() WHERE topic_id = %(topic_id)s")


def delete_group(run: Executor, group: str, *, topic: str | None = None, dry_run: bool = False) -> list[Loss]:
    """Delete a group, or only its subscription to `topic`. Return the loss per topic, in a dry run the expected loss.

    The group's inbox rows stay in the application's database, and a later group of the same name finds these rows.
    Raises UnknownGroup, and UsageError when consumers of the group are alive, or when the group has no subscription to
    `topic`.
    """
    with run.connection.transaction(force_rollback=dry_run):
        group_id = group_id_of(run, group)
        _refuse_live(run, group_id=group_id, topic=topic)
        subscribed = {name: topic_id for topic_id, name in run.rows(_SUBSCRIBED, {"group_id": group_id})}
        if topic is not None and topic not in subscribed:
            raise UsageError(
                f"group {group!r} has no subscription to {topic!r}; it has: {', '.join(subscribed) or 'none'}."
            )
        losses = [
            _unsubscribe(run, group, group_id, name, topic_id)
            for name, topic_id in subscribed.items()
            if topic in (None, name)
        ]
        if topic is None:
            for statement in _FORGET_GROUP:
                run.execute(statement, {"group_id": group_id})
    return losses


def delete_topic(run: Executor, topic: str, *, dry_run: bool = False) -> TopicLoss:
    """Delete a topic with all subscriptions to it. Return the loss; in a dry run, this is the expected loss.

    Each process refuses to publish to the deleted topic as soon as it has read the topics again (within 30 s).
    Retention removes the topic's messages. If the topic is declared again, it exists again. Raises UnknownTopic. Raises
    UsageError when consumers of the topic are alive.
    """
    topic_id = TopicCatalog(run.schema).get(run.connection, topic).topic_id
    values = {"topic_id": topic_id}
    with run.connection.transaction(force_rollback=dry_run):
        run.execute(_LOCK_TOPIC, values)
        # Lock the groups before reading their members, so that a consumer that is about to join waits for the group's
        # row.
        groups = {name: group_id_of(run, name) for (name,) in run.rows(_GROUPS_OF, values)}
        _refuse_live(run, topic=topic)
        [undelivered] = run.one(_UNDELIVERED, values)
        losses = [_unsubscribe(run, group, group_id, topic, topic_id) for group, group_id in groups.items()]
        run.execute(_MARK, values)
    return TopicLoss(topic, undelivered, losses)


def _refuse_live(run: Executor, *, group_id: int | None = None, topic: str | None = None) -> None:
    """Raise UsageError if a consumer of the group and the topic is alive. None stands for any group or any topic."""
    live = run.rows(_LIVE, {"group_id": group_id, "topic": topic})
    if live:
        consumers = "; ".join(f"{group!r} on {host} (pid {pid})" for group, host, pid in live[:5])
        raise UsageError(
            f"{len(live)} consumers are alive: {consumers}. Stop these consumers and run the command again. "
            "Nothing was changed."
        )


def _unsubscribe(run: Executor, group: str, group_id: int, topic: str, topic_id: int) -> Loss:
    values: dict[str, Any] = {"group_id": group_id, "topic_id": topic_id}
    lag = sum(queue.lag for queue in list_queues(run, group) if queue.topic == topic)
    loss = Loss(group, topic, lag, int(run.one(_RETRYING, values)[0]), int(run.one(_DEAD, values)[0]))
    values["retry_queues"] = integers([queue_id for (queue_id,) in run.rows(_RETRY_QUEUES, values)])
    for statement in _FORGET:
        run.execute(statement, values)
    for rows in hooks.subscription_rows.values():
        hooks.resolved(rows.deleted)(run, (group_id, topic_id))
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# For tests of applications with a real broker: read the messages that the broker would deliver, and empty the broker's
# tables.

_VISIBLE = Statement("""
SELECT topic.name AS topic, log.message_id, log.body, log.key, log.tag, coalesce(log.headers, '{{}}') AS headers,
       log.content_type, log.shard, log.deliver_at, log.born_at
FROM {schema}.consume_queue entry
JOIN {schema}.queue USING (queue_id)
JOIN {schema}.topic USING (topic_id)
JOIN {schema}.commit_log log USING (log_id)
WHERE topic.name = %(topic)s
ORDER BY queue.layout, queue.number, entry.queue_offset
""")

# The version numbers, the identity of the broker and its publishers stay. The positions of the scans only rise.
_TABLES = Statement("""
SELECT relname::text FROM pg_class
WHERE relnamespace = to_regnamespace(%(schema)s) AND relkind IN ('r', 'p')
  AND relname = ANY (SELECT unnest(objects) FROM {schema}.schema_version)
  AND relname NOT IN ('broker', 'schema_version', 'publisher', 'tick', 'half_scan', 'resync')
""")

# The statement replaces all ticks by one new empty tick, whose id follows the newest id.
_REWIND_TICKS = Statement("""
WITH newest AS (DELETE FROM {schema}.tick RETURNING tick_id, snapshot, incarnation)
INSERT INTO {schema}.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
SELECT tick_id + 1, snapshot, incarnation, 0, '{{}}', '{{}}', true FROM newest ORDER BY tick_id DESC LIMIT 1
""")


def visible(run: Executor, topic: str) -> list[Message]:
    """Return the messages that consumers of a topic can see: queue by queue, in queue order."""
    return run.objects(Message, _VISIBLE, {"topic": topic})


def empty(run: Executor) -> None:
    """Remove all messages, topics, groups and positions, as if the tables had just been installed.

    No process may use the tables during the call, because a consumer or leader would continue from positions that no
    longer exist.
    """
    with run.connection.transaction():
        # One statement for all tables, because those of parts may refer to the core's.
        tables = [sql.Identifier(run.schema, name) for (name,) in run.rows(_TABLES, {"schema": run.schema})]
        run.connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(tables)))
        run.execute(_REWIND_TICKS)
