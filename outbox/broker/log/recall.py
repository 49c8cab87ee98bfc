"""Recall messages that wait for their delivery time or for a retry.

Either the sequencer or the recall deletes the scheduled row of a message. If the sequencer deletes the row, the message
is queued; if the recall deletes it, the message is recalled. The row of a claimed message is not recalled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.arrays import uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.recall import Recall, RecallStatus

# Delete the scheduled rows of the messages in `wanted` (log_id), and return the outcome for each message.
_TAKE: Final = """, taken AS (
    -- The handler of a claimed message runs now, so a recall would come too late.
    DELETE FROM {schema}.scheduled WHERE log_id IN (SELECT log_id FROM wanted) AND NOT claimed
    RETURNING log_id, queue_id, attempt
), first_deliveries AS (
    INSERT INTO {schema}.recalled (log_id) SELECT log_id FROM taken WHERE queue_id IS NULL
), retries AS (
    INSERT INTO {schema}.recalled_retry (group_id, log_id, attempt)
    SELECT topic.retry_of, log_id, attempt
    FROM taken JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
    RETURNING log_id, group_id
), counted AS (
    UPDATE {schema}.subscription SET recalled = recalled + number
    FROM (SELECT group_id, topic_id, count(*) AS number
          FROM retries JOIN {schema}.commit_log USING (log_id) GROUP BY group_id, topic_id) AS of_group
    WHERE subscription.group_id = of_group.group_id AND subscription.topic_id = of_group.topic_id
)
SELECT log.message_id, topic.name AS topic, log.key,
       CASE WHEN log_id IN (SELECT log_id FROM taken) THEN 'recalled'
            WHEN op.decision IS NULL THEN 'undecided'
            WHEN op.decision = 'R' THEN 'rolled back'
            WHEN EXISTS (SELECT FROM {schema}.recalled before WHERE before.log_id = log.log_id)
              OR EXISTS (SELECT FROM {schema}.recalled_retry before WHERE before.log_id = log.log_id)
                THEN 'recalled before'
            WHEN EXISTS (SELECT FROM {schema}.consume_queue entry WHERE entry.log_id = log.log_id) THEN 'delivered'
            ELSE 'waiting' END AS status,
       ARRAY(SELECT name FROM retries JOIN {schema}.consumer_group USING (group_id)
             WHERE retries.log_id = log.log_id ORDER BY name) AS groups
FROM wanted JOIN {schema}.commit_log log USING (log_id)
JOIN {schema}.topic USING (topic_id)
LEFT JOIN {schema}.op_log op USING (transaction_id)
ORDER BY log_id
"""

_BY_ID: Final = Statement(
    """
WITH wanted AS MATERIALIZED (
    SELECT log_id FROM {schema}.commit_log WHERE message_id = ANY(%(ids)s::uuid[])
)"""
    + _TAKE
)

# The statement starts from the scheduled rows instead of the log, because the log keeps growing.
_BY_KEY: Final = Statement(
    """
WITH wanted AS MATERIALIZED (
    SELECT DISTINCT log_id FROM {schema}.scheduled JOIN {schema}.commit_log USING (log_id)
    WHERE key = %(key)s AND topic_id = (SELECT topic_id FROM {schema}.topic WHERE name = %(topic)s)
)"""
    + _TAKE
)


def recall(run: Executor, message_ids: Sequence[UUID]) -> list[Recall]:
    """Recall messages that wait for their delivery time or for a group's retry.

    Return one outcome per id, in the order of the ids.
    """
    found = {one.message_id: one for one in _recalls(run, _BY_ID, {"ids": uuids(list(message_ids))})}
    unknown = RecallStatus.UNKNOWN
    return [found.get(one, Recall(message_id=one, status=unknown)) for one in message_ids]


def recall_key(run: Executor, topic: str, key: str) -> list[Recall]:
    """Recall every waiting message of the topic and key, and return the recalled messages in the order of the log."""
    outcomes = _recalls(run, _BY_KEY, {"topic": topic, "key": key})
    # Leave out the messages that the sequencer queued at the same moment.
    return [one for one in outcomes if one.status is RecallStatus.RECALLED]


def _recalls(run: Executor, statement: Statement, values: Mapping[str, Any]) -> list[Recall]:
    return [
        Recall(message_id=message_id, topic=topic, key=key, status=RecallStatus(status), groups=tuple(groups))
        for message_id, topic, key, status, groups in run.rows(statement, values)
    ]
