"""Dead letters: messages a group gave up, with every attempt's error, and delivering them once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.broker.database.arrays import uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.registration import group_id_of


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message a group gave up after so many attempts. `replayed_at` is set while it is being delivered again."""

    group: str
    message_id: UUID
    topic: str
    key: str
    tag: str
    attempts: int
    error: str
    dead_at: datetime
    replayed_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One failed attempt, counted from 1."""

    attempt: int
    error: str
    failed_at: datetime


_LIST = Statement("""
SELECT g.name AS group, l.message_id, t.name AS topic, l.key, l.tag, d.attempts, d.error, d.dead_at, d.replayed_at
FROM {schema}.dead_letter d
JOIN {schema}.consumer_group g USING (group_id)
JOIN {schema}.commit_log l USING (log_id)
JOIN {schema}.topic t USING (topic_id)
WHERE (%(group)s::text IS NULL OR g.name = %(group)s)
  AND (%(replayed)s::boolean OR d.replayed_at IS NULL)
ORDER BY d.dead_at DESC, d.log_id DESC
LIMIT %(limit)s
""")


def list_dead_letters(
    run: Executor, group: str | None = None, *, replayed: bool = False, limit: int = 100
) -> Sequence[DeadLetter]:
    """The newest dead letters of one group or of all; `replayed` includes those that were replayed."""
    values = {"group": group, "replayed": replayed, "limit": limit}
    return run.objects(DeadLetter, _LIST, values)


_ATTEMPTS = Statement("""
SELECT f.attempt + 1 AS attempt, f.error, f.failed_at
FROM {schema}.failure f
JOIN {schema}.consumer_group g USING (group_id)
JOIN {schema}.commit_log l USING (log_id)
WHERE g.name = %(group)s AND l.message_id = %(message_id)s
ORDER BY f.attempt
""")


def failed_attempts(run: Executor, group: str, message_id: UUID) -> Sequence[FailedAttempt]:
    """Every failed attempt of a group at a message, first to last."""
    values = {"group": group, "message_id": message_id}
    return run.objects(FailedAttempt, _ATTEMPTS, values)


_REPLAY = Statement("""
WITH chosen AS (
    SELECT d.group_id, d.log_id
    FROM {schema}.dead_letter d
    JOIN {schema}.commit_log l USING (log_id)
    WHERE d.group_id = %(group_id)s AND d.replayed_at IS NULL
      AND (%(all)s::boolean OR l.message_id = ANY(%(message_ids)s::uuid[]))
    ORDER BY d.log_id
    LIMIT %(limit)s
    FOR UPDATE OF d
), marked AS (
    UPDATE {schema}.dead_letter d SET replayed_at = now()
    FROM chosen WHERE d.group_id = chosen.group_id AND d.log_id = chosen.log_id
)
INSERT INTO {schema}.scheduled (log_id, due_at, queue_id, attempt)
SELECT chosen.log_id, now(), q.queue_id, 0
FROM chosen
JOIN {schema}.topic t ON t.retry_of = chosen.group_id
JOIN {schema}.queue q ON q.topic_id = t.topic_id
ORDER BY chosen.log_id
ON CONFLICT DO NOTHING
""")


def replay(run: Executor, group: str, message_ids: Sequence[UUID] | None = None, *, limit: int = 10_000) -> int:
    """Deliver dead letters again through the group's retry queue, with a new series of attempts; returns how many.

    None: all of them, up to `limit`, oldest first. One that fails for good again is a dead letter again. Announce
    Channel.DECIDED afterwards to have them at once. Raises UnknownGroup.
    """
    with run.connection.transaction():
        values = {
            "group_id": group_id_of(run, group),
            "all": message_ids is None,
            "message_ids": uuids(list(message_ids or [])),
            "limit": limit,
        }
        return run.count(_REPLAY, values)
