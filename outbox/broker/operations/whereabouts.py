"""Find out which of some messages a consumer group can still receive."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset


class Whereabouts(enum.StrEnum):
    """A message's place for one consumer group."""

    WAITING = "waiting"
    """It is undecided, not queued yet, scheduled, held, queued before the group's offset, or waits for a retry."""
    DEAD = "dead"
    """It is a dead letter that no operator has settled."""
    DISCARDED = "discarded"
    """An operator has discarded the dead letter."""
    PASSED = "passed"
    """The group's offset has passed it: it was handled, skipped, or filtered."""
    GONE = "gone"
    """The broker does not have it: it expired, its database was restored, or its transaction was rolled back."""


# A decided message without an entry is not sequenced yet, or retention has removed the entry before the message.
_UNSEQUENCED_SECONDS: Final = 3600

_WHEREABOUTS: Final = Statement(
    """
WITH asked AS MATERIALIZED (
    SELECT log.message_id, log.log_id, log.half AND op.decision IS NULL AS undecided,
           op.decision IS NOT DISTINCT FROM 'R' AS rolled_back, log.stored_at, log.deliver_at
    FROM {schema}.commit_log log LEFT JOIN {schema}.op_log op USING (transaction_id)
    WHERE log.message_id = ANY (%(ids)s::uuid[])
), consumer AS MATERIALIZED (
    SELECT group_id FROM {schema}.consumer_group WHERE name = %(group)s
), entry AS MATERIALIZED (
    SELECT entry.log_id, bool_or(entry.queue_offset >= coalesce(newest.next_offset, 0)) AS ahead
    FROM {schema}.consume_queue entry
    JOIN {schema}.queue USING (queue_id)
    JOIN {schema}.topic ON topic.topic_id = queue.topic_id
    CROSS JOIN consumer
    LEFT JOIN LATERAL """
    + newest_offset("consumer.group_id", "queue.queue_id")
    + """ AS newest ON true
    WHERE entry.log_id = ANY (SELECT log_id FROM asked)
      AND (topic.retry_of IS NULL OR topic.retry_of = consumer.group_id)
    GROUP BY entry.log_id
)
SELECT asked.message_id, CASE
    WHEN asked.rolled_back THEN 'gone'
    WHEN asked.undecided OR entry.ahead
         OR EXISTS (SELECT FROM {schema}.scheduled WHERE scheduled.log_id = asked.log_id)
         OR EXISTS (SELECT FROM {schema}.held WHERE held.log_id = asked.log_id) THEN 'waiting'
    WHEN dead.discarded_at IS NOT NULL THEN 'discarded'
    WHEN dead.log_id IS NOT NULL AND dead.replayed_at IS NULL THEN 'dead'
    WHEN entry.log_id IS NOT NULL THEN 'passed'
    WHEN greatest(asked.stored_at, asked.deliver_at) > now() - make_interval(secs => %(unsequenced)s) THEN 'waiting'
    ELSE 'gone' END
FROM asked
LEFT JOIN entry USING (log_id)
LEFT JOIN {schema}.dead_letter dead ON dead.log_id = asked.log_id AND dead.group_id = (SELECT group_id FROM consumer)
"""
)


def whereabouts(run: Executor, group: str, message_ids: Sequence[UUID]) -> dict[UUID, Whereabouts]:
    """Return the place of each of these messages for the group, in one statement."""
    parameters = {"ids": list(message_ids), "group": group, "unsequenced": _UNSEQUENCED_SECONDS}
    found = {message_id: Whereabouts(where) for message_id, where in run.rows(_WHEREABOUTS, parameters)}
    return {message_id: found.get(message_id, Whereabouts.GONE) for message_id in message_ids}
