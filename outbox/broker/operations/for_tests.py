"""For tests of applications with a real broker: see what it would deliver, and start with empty tables."""

from __future__ import annotations

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.message import Message

_VISIBLE = Statement("""
SELECT topic.name AS topic, log.message_id, log.body, log.key, log.tag, coalesce(log.headers, '{{}}') AS headers,
       log.content_type, log.shard, log.deliver_at, log.born_at
FROM {schema}.consume_queue entry
JOIN {schema}.queue USING (queue_id)
JOIN {schema}.topic USING (topic_id)
JOIN {schema}.commit_log log USING (log_id)
WHERE topic.name = %(topic)s
ORDER BY queue.generation, queue.number, entry.queue_offset
""")

_EMPTY = Statement("""
TRUNCATE {schema}.topic, {schema}.queue, {schema}.commit_log, {schema}.op_log, {schema}.consume_queue,
         {schema}.held, {schema}.scheduled, {schema}.recalled, {schema}.pending_check, {schema}.check_history,
         {schema}.consumer_group, {schema}.subscription, {schema}.consumer, {schema}.queue_lease,
         {schema}.leader_lease, {schema}.consumer_offset, {schema}.finished_ahead, {schema}.failure,
         {schema}.dead_letter, {schema}.pruned, {schema}.incident, {schema}.producer_group, {schema}.recalled_retry,
         {schema}.producer_epoch, {schema}.fenced_half, {schema}.suspect, {schema}.suspect_vanished, {schema}.outage,
         {schema}.periodic_pass, {schema}.pruned_table, {schema}.summary, {schema}.audit, {schema}.life,
         {schema}.life_sign, {schema}.comparison, {schema}.missing_transaction
RESTART IDENTITY
""")

# The tables of the version numbers and of the broker's identity stay unchanged. Of these two, the newest row counts.
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

    No process may use them meanwhile: a consumer or leader would continue from positions that no longer exist.
    """
    with run.connection.transaction():
        run.execute(_EMPTY)
        run.execute(_REWIND_TICKS)
