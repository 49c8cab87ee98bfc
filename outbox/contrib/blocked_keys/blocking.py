"""Which keys are blocked, by which message, and how many messages wait for it.

The trigger `follow_dead_letter` of the schema adds the rows, in the transaction of each dead letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import (
    BY_ERROR,
    Concern,
    Declarations,
    Judged,
    Shown,
    Symptom,
    Threshold,
    fact_of,
)
from outbox.broker.operations.state import BrokerState
from outbox.subscription import Subscription

# The first message of the key of a message, if it is before this message in the log. Then also whether this message
# does not wait yet, although `limit` others block their keys or wait.
_FIRST: Final = Statement("""
SELECT first.message_id, EXISTS (
    SELECT FROM {schema}.blocking_message b
    WHERE b.group_id = first.group_id AND b.topic_id = first.topic_id OFFSET %(limit)s - 1
) AND NOT EXISTS (
    SELECT FROM {schema}.blocking_message own WHERE own.group_id = first.group_id AND own.log_id = log.log_id
)
FROM (
    SELECT group_id, topic_id, log_id, message_id FROM {schema}.blocking_message
    WHERE group_id = (SELECT group_id FROM {schema}.consumer_group WHERE name = %(group)s)
      AND topic_id = (SELECT topic_id FROM {schema}.topic WHERE name = %(topic)s) AND key = %(key)s
    ORDER BY log_id LIMIT 1
) AS first
JOIN {schema}.commit_log log ON log.message_id = %(message_id)s AND log.log_id > first.log_id
""")
_LIST: Final = Statement("""
SELECT g.name AS "group", t.name AS topic, key, first.message_id, waiting,
       extract(epoch FROM clock_timestamp() - first.since)::double precision AS blocked_seconds
FROM (
    SELECT group_id, topic_id, key, count(*) AS waiting FROM {schema}.blocking_message
    WHERE state = 'waiting' GROUP BY group_id, topic_id, key
) AS waits
CROSS JOIN LATERAL (
    SELECT message_id, since FROM {schema}.blocking_message b WHERE b.group_id = waits.group_id
      AND b.topic_id = waits.topic_id AND b.key = waits.key ORDER BY log_id LIMIT 1
) AS first
JOIN {schema}.consumer_group g USING (group_id)
JOIN {schema}.topic t USING (topic_id)
ORDER BY first.since
LIMIT 1000
""")
_REPLACE: Final = Statement("""
UPDATE {schema}.blocking_message SET key = %(replacement)s::text
WHERE topic_id = %(topic_id)s AND log_id = ANY(%(log_ids)s::bigint[]) AND %(replacement)s::text IS NOT NULL
  AND NOT starts_with(key, 'erased:')
""")


@dataclass(frozen=True, slots=True)
class BlockedKey:
    """A key whose messages wait. `message_id`: the message that blocks it. `waiting`: how many wait."""

    group: str
    topic: str
    key: str
    message_id: UUID
    waiting: int
    blocked_seconds: float


def first_of_key(
    run: Executor, subscription: Subscription, key: str, message_id: UUID, limit: int
) -> tuple[UUID | None, bool]:
    """Return the message that blocks the key of a message, or None, and whether there is no room to wait for it."""
    values = {"group": subscription.group, "topic": subscription.topic, "key": key}
    return run.row(_FIRST, {**values, "message_id": message_id, "limit": limit}) or (None, False)


def list_blocked_keys(run: Executor) -> Sequence[BlockedKey]:
    """Return at most a thousand keys whose messages wait, the longest blocked first."""
    return run.objects(BlockedKey, _LIST)


def replace_keys(run: Executor, values: Mapping[str, Any]) -> int:
    """Replace the keys of a person's messages, as in the log. Return their number; they keep their order."""
    return run.count(_REPLACE, values)


# -- the condition ---------------------------------------------------------------------------------


CONDITIONS: Final = Declarations[BrokerState]()
BLOCKED_KEY_SECONDS: Final = Threshold(
    "blocked_key_seconds", 60, 3600, "seconds", "how long a dead letter has blocked its key, if later messages wait"
)


@CONDITIONS.declare(
    meaning="A dead letter blocks its key: later messages of the key wait.",
    next_step="Correct the cause of the error. Then replay the dead letter with `outbox_dead_letter replay GROUP "
    "--error-type TYPE`, or discard it. The waiting messages follow in order "
    "(docs/order-and-delay.md#dead-letters-that-keep-the-order).",
    concern=Concern.WAITING,
    symptom=Symptom.STOPPED,
    thresholds=(BLOCKED_KEY_SECONDS,),
    shown=Shown(listed=BY_ERROR),
)
def blocked_key(state: BrokerState) -> Iterator[Judged]:
    for one in state.once(list_blocked_keys):
        severity, since = state.judge(BLOCKED_KEY_SECONDS, one.blocked_seconds), one.blocked_seconds
        named = ("group", "topic", "key", "waiting")
        yield severity, fact_of(one, *named, message_id=str(one.message_id), since_seconds=since)
