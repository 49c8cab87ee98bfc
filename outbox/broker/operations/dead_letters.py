"""List, replay and discard dead letters: messages that a group gave up, with every attempt's error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from outbox.broker.database.arrays import bigints, uuids
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.groups import registration
from outbox.broker.groups.registration import group_id_of


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up after `attempts` attempts.

    `replayed_at` is the time at which an operator replayed or discarded the letter. `discarded_at` is set only if an
    operator discarded it.
    """

    group: str
    message_id: UUID
    topic: str
    key: str
    tag: str
    attempts: int
    error: str
    dead_at: datetime
    replayed_at: datetime | None
    discarded_at: datetime | None
    log_id: int

    @property
    def place(self) -> PagePosition:
        return PagePosition(self.dead_at, self.log_id)


class PagePosition(NamedTuple):
    """A position in a list that is ordered by time: the next page begins after that of the last row."""

    dead_at: datetime
    log_id: int

    def __str__(self) -> str:
        return f"{self.dead_at.isoformat()}/{self.log_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterSelection:
    """Criteria that select dead letters. A letter must meet all given criteria; without criteria, all letters match.

    `error` selects letters whose last error contains this text; upper and lower case do not matter. `error_type` is the
    name of the last error's type. `since` (inclusive) and `until` (exclusive) limit the time at which the group gave
    the message up.
    """

    message_ids: Sequence[UUID] | None = None
    topic: str | None = None
    key: str | None = None
    error: str | None = None
    error_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters for the statements of this module."""
        return {**asdict(self), "message_ids": None if self.message_ids is None else uuids(self.message_ids)}


ALL: Final = LetterSelection()


# The text of a stored error begins with the name of the error's type (groups.send_back.describe).
_SELECTED: Final = """
    (%(message_ids)s::uuid[] IS NULL OR l.message_id = ANY(%(message_ids)s::uuid[]))
      AND (%(topic)s::text IS NULL OR t.name = %(topic)s::text)
      AND (%(key)s::text IS NULL OR l.key = %(key)s::text)
      AND (%(error)s::text IS NULL OR position(lower(%(error)s::text) IN lower(d.error)) > 0)
      AND (%(error_type)s::text IS NULL OR split_part(d.error, ':', 1) = %(error_type)s::text)
      AND (%(since)s::timestamptz IS NULL OR d.dead_at >= %(since)s::timestamptz)
      AND (%(until)s::timestamptz IS NULL OR d.dead_at < %(until)s::timestamptz)
"""

_LIST = Statement(f"""
SELECT g.name AS group, l.message_id, t.name AS topic, l.key, l.tag, d.attempts, d.error, d.dead_at,
       CASE WHEN d.discarded_at IS NULL THEN d.replayed_at END AS replayed_at,
       CASE WHEN d.replayed_at IS NOT NULL THEN d.discarded_at END AS discarded_at, d.log_id
FROM {{schema}}.dead_letter d
JOIN {{schema}}.consumer_group g USING (group_id)
JOIN {{schema}}.commit_log l USING (log_id)
JOIN {{schema}}.topic t USING (topic_id)
WHERE (%(group)s::text IS NULL OR g.name = %(group)s::text)
  AND (%(settled)s::boolean OR d.replayed_at IS NULL)
  AND (%(after_id)s::bigint IS NULL OR (d.dead_at, d.log_id) < (%(after)s::timestamptz, %(after_id)s::bigint))
  AND {_SELECTED}
ORDER BY d.dead_at DESC, d.log_id DESC
FETCH FIRST %(limit)s ROWS WITH TIES
""")


def list_dead_letters(
    run: Executor,
    group: str | None = None,
    selection: LetterSelection = ALL,
    *,
    settled: bool = False,
    after: PagePosition | None = None,
    limit: int = 100,
) -> Sequence[DeadLetter]:
    """Return a page of the dead letters of one group or of all groups, the newest letter first.

    To read the next page, pass the `place` of the last letter as `after`. If several groups gave up one message at the
    same instant, their letters have the same place and are on the same page, so a page may be longer than `limit`.
    """
    values = selection.parameters() | {"group": group, "settled": settled, "limit": limit}
    place = {"after": after and after.dead_at, "after_id": after and after.log_id}
    return run.objects(DeadLetter, _LIST, values | place)


_ATTEMPTS = Statement("""
SELECT f.attempt + 1 AS attempt, f.error, f.failed_at
FROM {schema}.failure f
JOIN {schema}.consumer_group g USING (group_id)
JOIN {schema}.commit_log l USING (log_id)
WHERE g.name = %(group)s AND l.message_id = %(message_id)s
ORDER BY f.attempt
""")


def failed_attempts(run: Executor, group: str, message_id: UUID) -> Sequence[Row]:
    """Return number (from 1), error and time of each failed attempt of a group at a message, in the order of time."""
    return run.objects(Row, _ATTEMPTS, {"group": group, "message_id": message_id})


_CHOSEN: Final = f"""
WITH chosen AS (
    SELECT d.group_id, d.log_id, l.topic_id
    FROM {{schema}}.dead_letter d
    JOIN {{schema}}.commit_log l USING (log_id)
    JOIN {{schema}}.topic t USING (topic_id)
    WHERE d.group_id = %(group_id)s AND d.replayed_at IS NULL AND {_SELECTED}
    ORDER BY d.log_id
    LIMIT %(limit)s
    FOR UPDATE OF d
)
"""
_LOCK = Statement(_CHOSEN + "SELECT log_id, topic_id FROM chosen ORDER BY log_id")


def lock(run: Executor, group: str, selection: LetterSelection, *, limit: int) -> list[int]:
    """Lock at most `limit` dead letters, the oldest first, until the transaction ends. Return their log ids.

    Meanwhile no other transaction replays or discards them. Raises UnknownGroup.
    """
    values = selection.parameters() | {"group_id": group_id_of(run, group), "limit": limit}
    return [log_id for log_id, _ in run.rows(_LOCK, values)]


# Only locked letters, because the group may have no retry queue for the topic of a letter that is new since the lock.
_REPLAY = Statement("""
WITH chosen AS (
    UPDATE {schema}.dead_letter d SET replayed_at = now(), discarded_at = NULL
    FROM {schema}.commit_log l
    WHERE d.group_id = %(group_id)s AND d.log_id = ANY (%(log_ids)s::bigint[]) AND l.log_id = d.log_id
    RETURNING d.group_id, d.log_id, l.topic_id
), delivered AS (
    INSERT INTO {schema}.scheduled (log_id, due_at, queue_id, attempt)
    SELECT chosen.log_id, now(), q.queue_id, 0
    FROM chosen
    JOIN {schema}.topic t ON t.retry_of = chosen.group_id
    JOIN {schema}.queue q ON q.topic_id = t.topic_id AND q.number = chosen.topic_id
    ORDER BY chosen.log_id
    ON CONFLICT DO NOTHING
    RETURNING log_id
), counted AS (
    -- After a reset, the group may have an entry of a message that waits for its first attempt after a replay already.
    UPDATE {schema}.subscription known SET discarded = discarded + one.letters
    FROM (
        SELECT topic_id, count(*) AS letters FROM chosen
        WHERE NOT EXISTS (SELECT FROM delivered WHERE delivered.log_id = chosen.log_id)
        GROUP BY topic_id
    ) AS one
    WHERE known.group_id = %(group_id)s AND known.topic_id = one.topic_id
)
SELECT count(*) FROM delivered
""")


def replay(run: Executor, group: str, selection: LetterSelection = ALL, *, limit: int = 10_000) -> int:
    """Deliver at most `limit` dead letters again through the group's retry queues, with new attempts, the oldest first.

    Return the number of letters. A message that fails all attempts again becomes a dead letter again. To have the
    messages delivered at once, the caller then sends a notification on Channel.DECIDED. Raises UnknownGroup.
    """
    with run.connection.transaction():
        values = selection.parameters() | {"group_id": group_id_of(run, group), "limit": limit}
        locked = run.rows(_LOCK, values)
        for topic_id in sorted({topic_id for _, topic_id in locked}):
            registration.ensure_retry_queue(run, values["group_id"], topic_id)
        log_ids = bigints([log_id for log_id, _ in locked])
        return int(run.one(_REPLAY, {"group_id": values["group_id"], "log_ids": log_ids})[0])


_DISCARD = Statement(f"""{_CHOSEN}
, marked AS (
    UPDATE {{schema}}.dead_letter d SET replayed_at = now(), discarded_at = now()
    FROM chosen WHERE d.group_id = chosen.group_id AND d.log_id = chosen.log_id
    RETURNING chosen.topic_id
), counted AS (
    UPDATE {{schema}}.subscription known SET discarded = discarded + one.letters
    FROM (SELECT topic_id, count(*) AS letters FROM marked GROUP BY topic_id) AS one
    WHERE known.group_id = %(group_id)s AND known.topic_id = one.topic_id
)
SELECT count(*) FROM marked
""")


def discard(run: Executor, group: str, selection: LetterSelection, *, limit: int = 10_000) -> int:
    """Discard at most `limit` dead letters, the oldest first, and return their number. Raises UnknownGroup.

    The group counts these letters as discarded. Retention removes them together with their messages.
    """
    with run.connection.transaction():
        values = selection.parameters() | {"group_id": group_id_of(run, group), "limit": limit}
        return int(run.one(_DISCARD, values)[0])
