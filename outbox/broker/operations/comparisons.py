"""Results of comparing the application's databases with the broker, stored for status and metrics.

The application compares, because only it can reach both databases (outbox.contrib.django.operations.comparing).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset, positions

# A comparison names at most this many ids.
NAMED: Final = 20


class ComparisonKind(StrEnum):
    """The data that a comparison covers."""

    LEDGER = "ledger"
    """Committed transactions that the broker does not know: their messages are lost."""
    DECISION = "decision"
    """Transactions that are committed in the broker and unknown to the ledger: their business rows are lost."""
    INBOX = "inbox"
    """Messages that a group has passed and that its inbox does not know: their effects are lost."""


# Kind, subject, topic and alias.
ComparisonKey = tuple[ComparisonKind, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatabaseComparison:
    """The last comparison of one subject: a producer group, or a consumer group on `topic`.

    `state`: the point at which the next comparison starts. `missing`: the number of missing transactions or messages,
    from `first_at` to `last_at`. `ids`: at most twenty of them. From `unproven_from` to `unproven_to` data was lost,
    but no row is left that proves the loss.
    """

    kind: ComparisonKind
    subject: str
    topic: str = ""
    alias: str
    life_id: UUID
    compared_at: datetime | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    missing: int = 0
    first_at: datetime | None = None
    last_at: datetime | None = None
    ids: Sequence[UUID] = ()
    unproven_from: datetime | None = None
    unproven_to: datetime | None = None

    @property
    def key(self) -> ComparisonKey:
        return self.kind, self.subject, self.topic, self.alias

    @property
    def is_clean(self) -> bool:
        """Whether the comparison found neither missing data nor an unproven loss."""
        return not self.missing and self.unproven_to is None


_ALL = Statement("""
SELECT kind, subject, topic, alias, life_id, compared_at, state, missing, first_at, last_at, ids, unproven_from,
       unproven_to
FROM {schema}.comparison ORDER BY kind, subject, topic, alias
""")
_STORE = Statement("""
INSERT INTO {schema}.comparison AS known (kind, subject, topic, alias, life_id, state, missing, first_at, last_at, ids,
                                          unproven_from, unproven_to)
VALUES (%(kind)s, %(subject)s, %(topic)s, %(alias)s, %(life_id)s, %(state)s::text::jsonb, %(missing)s, %(first_at)s,
        %(last_at)s, %(ids)s::uuid[], %(unproven_from)s, %(unproven_to)s)
ON CONFLICT (kind, subject, topic, alias) DO UPDATE
SET life_id = excluded.life_id, compared_at = now(), state = excluded.state, missing = excluded.missing,
    first_at = excluded.first_at, last_at = excluded.last_at, ids = excluded.ids,
    unproven_from = excluded.unproven_from, unproven_to = excluded.unproven_to
""")
_FORGET = Statement("""
DELETE FROM {schema}.comparison
WHERE kind = %(kind)s AND subject = %(subject)s AND topic = %(topic)s AND alias = %(alias)s
""")


def list_comparisons(run: Executor) -> dict[ComparisonKey, DatabaseComparison]:
    """Return the last comparison of each subject, by its key."""
    rows = run.objects(dict, _ALL)
    found = [DatabaseComparison(**{**row, "kind": ComparisonKind(row["kind"])}) for row in rows]
    return {one.key: one for one in found}


def store(run: Executor, comparison: DatabaseComparison) -> None:
    given = {"state": json.dumps(comparison.state), "ids": arrays.uuids(list(comparison.ids))}
    run.execute(_STORE, dataclasses.asdict(comparison) | given | {"kind": comparison.kind.value})


def forget(run: Executor, comparison: DatabaseComparison) -> None:
    """Delete the comparison, so that the next comparison of the subject does not continue from its `state`."""
    run.execute(_FORGET, dict(zip(("kind", "subject", "topic", "alias"), map(str, comparison.key), strict=True)))


# -- transactions -------------------------------------------------------------------------------------


# Retention removes the messages of a deleted topic at once, so the time of the deletion is a bound, too.
_BOUNDS = Statement("""
SELECT created_at AS installed_at,
       (SELECT greatest(max(now() - make_interval(secs => retention_seconds)) FILTER (WHERE deleted_at IS NULL),
                        max(deleted_at))
        FROM {schema}.topic WHERE retry_of IS NULL) AS kept_since
FROM {schema}.broker
""")


def bounds(run: Executor) -> Row:
    """The broker must know every transaction after `installed_at` and after `kept_since` (the retention limit)."""
    return run.objects(Row, _BOUNDS)[0]


_COMMITTED_OF_LEDGER = Statement("""
SELECT op.transaction_id FROM {schema}.op_log op
JOIN {schema}.commit_log log ON log.message_id = op.transaction_id
WHERE op.transaction_id > %(after)s AND op.decision = 'C' AND op.decided_by IN ('P', 'K')
  AND log.half AND log.ledger_id = %(ledger_id)s
ORDER BY op.transaction_id LIMIT %(limit)s
""")


def committed_of_ledger(run: Executor, ledger_id: UUID, after: UUID, *, limit: int) -> list[UUID]:
    """Return the next committed transactions of a ledger after the id `after`, ordered by id.

    Transactions that an operator decided are left out.
    """
    values = {"ledger_id": ledger_id, "after": after, "limit": limit}
    return [found for (found,) in run.rows(_COMMITTED_OF_LEDGER, values)]


_ADD_MISSING = Statement("""
INSERT INTO {schema}.missing_transaction (transaction_id, kind, producer_group, alias, at)
SELECT given.id, %(kind)s, %(group)s, %(alias)s, given.at
FROM unnest(%(ids)s::uuid[], %(at)s::timestamptz[]) AS given (id, at)
ON CONFLICT DO NOTHING
""")
_OPEN_MISSING = Statement("""
SELECT transaction_id FROM {schema}.missing_transaction
WHERE kind = %(kind)s AND producer_group = %(group)s AND alias = %(alias)s AND settled_at IS NULL
  AND transaction_id > %(after)s
ORDER BY transaction_id LIMIT %(limit)s
""")
_REMOVE_MISSING = Statement("""
DELETE FROM {schema}.missing_transaction WHERE kind = %(kind)s AND transaction_id = ANY (%(ids)s::uuid[])
""")
# The ledger keeps no rows of these transactions any more, so no later comparison finds them again.
_TRIM_MISSING = Statement("""
DELETE FROM {schema}.missing_transaction
WHERE producer_group = %(group)s AND settled_at < now() - make_interval(secs => %(keep)s)
""")
_SUM_MISSING = Statement("""
SELECT count(*), min(at), max(at), coalesce((array_agg(transaction_id ORDER BY transaction_id))[1:%(named)s], '{{}}')
FROM {schema}.missing_transaction
WHERE kind = %(kind)s AND producer_group = %(group)s AND alias = %(alias)s AND settled_at IS NULL
""")
_SETTLE_MISSING = Statement("""
UPDATE {schema}.missing_transaction SET settled_at = now()
WHERE kind = %(kind)s AND producer_group = %(group)s AND alias = %(alias)s AND settled_at IS NULL
""")


@dataclass(frozen=True, slots=True)
class MissingTransactions:
    """The transactions that a ledger has and the broker lacks, or that the broker has and the ledger lacks."""

    run: Executor
    kind: ComparisonKind
    producer_group: str
    alias: str

    def _named(self, **more: Any) -> dict[str, Any]:
        return {"kind": self.kind.value, "group": self.producer_group, "alias": self.alias, **more}

    def add(self, found: Mapping[UUID, datetime]) -> None:
        """Store the ids and times of missing transactions. Transactions that are already settled stay settled."""
        if found:
            self.run.execute(
                _ADD_MISSING, self._named(ids=arrays.uuids(list(found)), at=arrays.times(list(found.values())))
            )

    def open(self, after: UUID = UUID(int=0), *, limit: int) -> list[UUID]:
        """Return the next missing transactions that no operator has settled, in the order of their ids."""
        return [one for (one,) in self.run.rows(_OPEN_MISSING, self._named(after=after, limit=limit))]

    def remove(self, found: Sequence[UUID]) -> None:
        """Remove transactions that are no longer missing."""
        if found:
            self.run.execute(_REMOVE_MISSING, {"kind": self.kind.value, "ids": arrays.uuids(list(found))})

    def trim(self, *, keep_seconds: float) -> None:
        """Remove the transactions that were settled more than `keep_seconds` ago."""
        self.run.execute(_TRIM_MISSING, {"group": self.producer_group, "keep": keep_seconds})

    def totals(self) -> tuple[int, datetime | None, datetime | None, list[UUID]]:
        """Return the number of unsettled transactions, their first and last time, and up to twenty of their ids."""
        count, first, last, ids = self.run.one(_SUM_MISSING, self._named(named=NAMED))
        return count, first, last, ids

    def settle(self) -> int:
        """Mark all unsettled transactions as settled by an operator, and return the number of these transactions."""
        return self.run.count(_SETTLE_MISSING, self._named())


# -- inboxes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """A queue of a topic, and a group's position on this queue.

    `floor`: the group has handled no entry before this offset, or retention has removed it.
    `moved`: the number of entries that resets have skipped, minus the number of entries that resets made the group read
    again.
    """

    queue_id: int
    group_id: int
    generation: int
    floor: int
    next_offset: int
    moved: int


_PASSED = Statement(f"""
SELECT queue.queue_id, known.group_id, known.generation, greatest(queue.floor, newest.start_offset) AS floor,
       newest.next_offset, newest.moved
FROM {{schema}}.consumer_group known
JOIN {{schema}}.subscription USING (group_id)
JOIN {{schema}}.topic USING (topic_id)
JOIN {{schema}}.queue USING (topic_id)
CROSS JOIN LATERAL {newest_offset("known.group_id", "queue.queue_id")} AS newest
WHERE known.name = %(group)s AND topic.name = %(topic)s
ORDER BY queue.queue_id
""")


def group_positions(run: Executor, group: str, topic: str) -> list[GroupPosition]:
    """Return the queues of a topic on which the group has a position."""
    return run.objects(GroupPosition, _PASSED, {"group": group, "topic": topic})


def read_again_from(run: Executor, queue: GroupPosition) -> int:
    """Return the lowest known position of the group since its last reset.

    The result is the target of the reset, or a later offset if retention has removed the row of the reset.
    """
    since = itertools.takewhile(lambda row: row[1] == queue.moved, positions(run, queue.group_id, queue.queue_id))
    return min([queue.next_offset, *(next_offset for next_offset, _ in since)])


# Without messages that may have no effect: they have failed or timed out, or left their queue without a failure (a
# claim, newer code), and then wait in `scheduled` or in a retry queue of the group, or were recalled.
_ENTRIES = Statement(f"""
WITH waiting AS MATERIALIZED (
    SELECT entry.log_id
    FROM {{schema}}.topic JOIN {{schema}}.queue USING (topic_id)
    LEFT JOIN LATERAL {newest_offset("%(group_id)s", "queue.queue_id")} AS newest ON true
    JOIN {{schema}}.consume_queue entry
      ON entry.queue_id = queue.queue_id AND entry.queue_offset >= coalesce(newest.next_offset, 0)
    WHERE topic.retry_of = %(group_id)s
)
SELECT entry.queue_offset, log.message_id, entry.queued_at, log.tag,
       CASE WHEN jsonb_typeof(log.headers) = 'object' THEN log.headers ELSE '{{{{}}}}' END AS headers
FROM {{schema}}.consume_queue entry JOIN {{schema}}.commit_log log USING (log_id)
WHERE entry.queue_id = %(queue_id)s AND entry.queue_offset >= %(low)s AND entry.queue_offset < %(high)s
  AND log.stored_at > now() - make_interval(secs => %(keep)s)
  AND NOT EXISTS (SELECT FROM {{schema}}.failure WHERE failure.group_id = %(group_id)s AND failure.log_id = log.log_id)
  AND NOT EXISTS (SELECT FROM {{schema}}.dead_letter dead
                  WHERE dead.group_id = %(group_id)s AND dead.log_id = log.log_id)
  AND NOT EXISTS (SELECT FROM {{schema}}.timed_out
                  WHERE timed_out.group_id = %(group_id)s AND timed_out.log_id = log.log_id)
  AND NOT EXISTS (SELECT FROM {{schema}}.scheduled JOIN {{schema}}.queue away ON away.queue_id = scheduled.queue_id
                  JOIN {{schema}}.topic ON topic.topic_id = away.topic_id
                  WHERE scheduled.log_id = log.log_id AND topic.retry_of = %(group_id)s)
  AND NOT EXISTS (SELECT FROM {{schema}}.recalled_retry taken
                  WHERE taken.group_id = %(group_id)s AND taken.log_id = log.log_id)
  AND log.log_id NOT IN (SELECT log_id FROM waiting)
ORDER BY entry.queue_offset
""")


def finished_entries(run: Executor, queue: GroupPosition, low: int, high: int, *, keep_seconds: float) -> list[Row]:
    """Return the messages at offsets from `low` to `high - 1` that the group has finished without any failure.

    Messages older than `keep_seconds` are left out. A row has the `queue_offset`, `message_id` and `queued_at` of a
    message, and the values that a filter may read: `tag` and `headers`.
    """
    values = {"queue_id": queue.queue_id, "group_id": queue.group_id, "low": low, "high": high, "keep": keep_seconds}
    return run.objects(Row, _ENTRIES, values)
