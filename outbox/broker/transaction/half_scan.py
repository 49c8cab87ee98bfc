"""Finding half messages that nobody decided, at a cost that follows the undecided ones.

The scan reads new half rows by pairs of snapshots: those whose transaction the last scan could not see. An id
cursor would forget transactions that commit late, and the oldest running transaction as a limit would let any
open transaction elsewhere stop it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from psycopg.errors import UniqueViolation

from outbox.broker.database.arrays import cursor_on, uuids, xids
from outbox.broker.database.connection import Connection
from outbox.broker.database.snapshot import Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lifted

DEFAULT_BATCH: Final = 200_000

_LAST = Statement("SELECT scan_id, snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1")

# `edge`: a long backlog is cut at a transaction id; the new snapshot then says that everything from there on is
# unread. Bounded by the current snapshot, because rows of before a restore may carry ids of the future.
_SCAN = Statement("""
WITH edge AS (
    SELECT coalesce(
        min(xid) FILTER (WHERE earlier >= %(batch)s),
        CASE WHEN count(*) > 0 AND max(earlier + rows) > %(batch)s THEN
            (SELECT min(xid) FROM {schema}.commit_log next WHERE half AND next.xid > max(per_xid.xid)
                AND next.xid < pg_snapshot_xmax(pg_current_snapshot())) END,
        pg_snapshot_xmax(pg_current_snapshot())) AS cut
    FROM (
        SELECT xid, count(*) AS rows, sum(count(*)) OVER (ORDER BY xid) - count(*) AS earlier
        FROM (SELECT xid FROM {schema}.commit_log
              WHERE half AND xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
              ORDER BY xid LIMIT %(batch)s + 1) unread
        GROUP BY xid
    ) per_xid
), fresh AS MATERIALIZED (
    SELECT log_id, transaction_id, message_id, producer_group, stored_at, immunity_seconds
    FROM {schema}.commit_log WHERE half AND xid >= %(xmax)s::xid8 AND xid < (SELECT cut FROM edge)
    UNION ALL
    SELECT log_id, transaction_id, message_id, producer_group, stored_at, immunity_seconds
    FROM {schema}.commit_log WHERE half AND xid = ANY(%(xip)s::xid8[])
), moved AS (
    INSERT INTO {schema}.pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)
    SELECT transaction_id, log_id, coalesce(producer_group, ''), stored_at,
           stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s)),
           stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s))
    FROM fresh
    WHERE message_id = transaction_id
      AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = fresh.transaction_id)
    ORDER BY transaction_id
    ON CONFLICT (transaction_id) DO NOTHING
    RETURNING 1
), found AS (
    SELECT (SELECT count(*) FROM fresh) AS fresh, (SELECT count(*) FROM moved) AS moved, cut,
           cut < pg_snapshot_xmax(pg_current_snapshot()) AS more
    FROM edge
), recorded AS (
    INSERT INTO {schema}.half_scan (scan_id, snapshot, moved)
    SELECT %(scan_id)s + 1,
           (least(pg_snapshot_xmin(pg_current_snapshot()), cut)::text || ':' || cut::text || ':' ||
            coalesce((SELECT string_agg(xip::text, ',' ORDER BY xip)
                      FROM pg_snapshot_xip(pg_current_snapshot()) AS xip WHERE xip < cut), ''))::pg_snapshot,
           moved
    FROM found
    WHERE fresh > 0
)
SELECT fresh, moved, more FROM found
""")

_NEWEST = Statement("SELECT max(scan_id) FROM {schema}.half_scan")

_DROP_DECIDED_PARKED = Statement("""
DELETE FROM {schema}.pending_check
WHERE parked_at IS NOT NULL
  AND EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending_check.transaction_id)
""")

_UNDECIDED_BELOW = Statement("""
SELECT pending.transaction_id, now() < pending.immune_until
FROM {schema}.pending_check pending JOIN {schema}.commit_log log USING (log_id)
WHERE log.ledger_id = %(ledger_id)s AND pending.transaction_id < %(below)s
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
ORDER BY pending.transaction_id LIMIT %(limit)s
""")

_HINT = Statement("""
INSERT INTO {schema}.pending_check AS pending
    (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)
SELECT transaction_id, log_id, coalesce(producer_group, ''), stored_at,
       stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s)), now()
FROM {schema}.commit_log log
WHERE message_id = ANY(%(ids)s::uuid[]) AND half
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = log.transaction_id)
ORDER BY transaction_id
ON CONFLICT (transaction_id) DO UPDATE SET due_at = least(pending.due_at, now()) WHERE pending.parked_at IS NULL
""")


@dataclass(frozen=True, slots=True)
class ScanCounts:
    """What one scan pass did; `more` says that a backlog is left, or may be left."""

    scanned: int = 0
    moved: int = 0
    more: bool = False


def scan_halves(
    connection: Connection, schema: str, *, immunity_seconds: int, batch: int = DEFAULT_BATCH
) -> ScanCounts:
    """One bounded scan pass: new undecided half transactions get a pending_check row, due when immunity ends.

    Any number may run at once: two that read the same part collide on the scan's id, and one gives up.
    """
    with cursor_on(connection) as cursor:
        last = cursor.execute(_LAST.on(schema)).fetchone()
        assert last is not None
        snapshot = Snapshot.parse(last[1])
        parameters = {
            "scan_id": last[0],
            "xmax": str(snapshot.xmax),
            "xip": xids(snapshot.in_progress),
            "batch": batch,
            "immunity": immunity_seconds,
        }
        try:
            # Not prepared: the plan must see the values, or it reads the whole log.
            with lifted(connection):
                row = cursor.execute(_SCAN.on(schema), parameters, prepare=False).fetchone()
        except UniqueViolation:
            # What the other one has left, if anything, is not known here.
            return ScanCounts(more=True)
    assert row is not None
    return ScanCounts(*row)


def drop_decided_parked(connection: Connection, schema: str) -> int:
    """Forget parked transactions that a late end or an operator has decided; returns how many."""
    with lifted(connection):
        return connection.execute(_DROP_DECIDED_PARKED.on(schema)).rowcount


@dataclass(frozen=True, slots=True)
class Undecided:
    """A half transaction without a decision; `immune`: too young for a check that may write."""

    transaction_id: UUID
    immune: bool


def undecided_below(
    connection: Connection, schema: str, ledger_id: UUID, below: UUID, *, limit: int
) -> list[Undecided]:
    """The first undecided transactions of a ledger by id, parked ones included. What is not scanned is not seen."""
    with cursor_on(connection) as cursor:
        parameters = {"ledger_id": ledger_id, "below": below, "limit": limit}
        return [Undecided(*row) for row in cursor.execute(_UNDECIDED_BELOW.on(schema), parameters)]


def hint_checks(connection: Connection, schema: str, ids: list[UUID], *, immunity_seconds: int) -> int:
    """Make undecided half transactions due for a check now (read-only before immunity ends); returns how many."""
    with cursor_on(connection) as cursor:
        return cursor.execute(_HINT.on(schema), {"ids": uuids(ids), "immunity": immunity_seconds}).rowcount
