"""Find undecided half messages, at a cost that is proportional to the number of undecided half messages.

The half scan compares two snapshots. It reads the half messages whose transactions the last scan could not see. A
cursor over ids would miss transactions that commit late. If the oldest running transaction were the limit, any open
transaction would stop the scan. The statement binds the upper end of the last snapshot as `%(xmax)s` and its running
transactions as `%(xip)s`. With the snapshot functions inside one OR condition, PostgreSQL would scan the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString
from uuid import UUID

from psycopg.errors import UniqueViolation

from outbox.broker.database.arrays import UUIDS, xids
from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.sender import first_row
from outbox.broker.database.statement import INTEGER, Request, Statement
from outbox.broker.database.timeouts import lifted
from outbox.transaction import CheckSettings

DEFAULT_BATCH: Final = 200_000

_LAST = Statement("SELECT scan_id, snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1")

_IMMUNE_UNTIL: Final = "stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s))"


def insert_pending(source: LiteralString, where: LiteralString) -> LiteralString:
    """Return the INSERT of one `pending_check` row per undecided transaction, due when its immunity ends.

    The half message stores the length of its immunity. If the half message stores no length, the setting of the process
    that finds the message applies. Immunity counts from the time at which the half message was stored.

    `source` has the log's columns and the alias `half_row`. The rows are sorted, because inserts that may conflict must
    lock in one order.
    """
    return f"""
INSERT INTO {{schema}}.pending_check AS pending
    (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)
SELECT transaction_id, log_id, coalesce(producer_group, ''), stored_at, {_IMMUNE_UNTIL}, {_IMMUNE_UNTIL}
FROM {source}
WHERE {where}
  AND NOT EXISTS (SELECT FROM {{schema}}.op_log WHERE op_log.transaction_id = half_row.transaction_id)
ORDER BY transaction_id
"""


# `edge` has the transaction id up to which the scan reads. If many rows are unread, the scan reads about `batch` rows,
# and always all rows of a transaction. If few rows are unread, `edge` has the end of the current snapshot. The current
# snapshot limits the query, because rows from before a restore may have higher transaction ids than the rows that are
# written now. The scan stores the current snapshot without the transactions from the id in `edge` on, so that the next
# scan reads these transactions.
_SCAN = Statement(f"""
WITH edge AS (
    SELECT coalesce(
        min(xid) FILTER (WHERE earlier >= %(batch)s),
        CASE WHEN sum(rows) > %(batch)s THEN
            (SELECT min(next.xid) FROM {{schema}}.commit_log next WHERE half AND next.xid > max(per_xid.xid)
                AND next.xid < pg_snapshot_xmax(pg_current_snapshot())) END,
        pg_snapshot_xmax(pg_current_snapshot())) AS cut
    FROM (
        SELECT xid, count(*) AS rows, sum(count(*)) OVER (ORDER BY xid) - count(*) AS earlier
        FROM (SELECT xid FROM {{schema}}.commit_log
              WHERE half AND xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
              ORDER BY xid LIMIT %(batch)s + 1) AS unread
        GROUP BY xid
    ) AS per_xid
), fresh AS MATERIALIZED (
    SELECT log_id, transaction_id, message_id, producer_group, stored_at, immunity_seconds
    FROM {{schema}}.commit_log WHERE half AND xid >= %(xmax)s::xid8 AND xid < (SELECT cut FROM edge)
    UNION ALL
    SELECT log_id, transaction_id, message_id, producer_group, stored_at, immunity_seconds
    FROM {{schema}}.commit_log WHERE half AND xid = ANY(%(xip)s::xid8[])
), moved AS ({insert_pending("fresh AS half_row", "message_id = transaction_id")}
    ON CONFLICT (transaction_id) DO NOTHING
    RETURNING 1
), found AS (
    SELECT (SELECT count(*) FROM fresh) AS fresh, (SELECT count(*) FROM moved) AS moved, cut,
           cut < pg_snapshot_xmax(pg_current_snapshot()) AS more
    FROM edge
), recorded AS (
    INSERT INTO {{schema}}.half_scan (scan_id, snapshot)
    SELECT %(scan_id)s + 1,
           (least(pg_snapshot_xmin(pg_current_snapshot()), cut)::text || ':' || cut::text || ':' ||
            coalesce((SELECT string_agg(xip::text, ',' ORDER BY xip)
                      FROM pg_snapshot_xip(pg_current_snapshot()) AS xip WHERE xip < cut), ''))::pg_snapshot
    FROM found
    WHERE fresh > 0
)
SELECT fresh, moved, more FROM found
""")

# Transaction ids begin with a time, so the order of ids is nearly the order in which the transactions began.
_WAITING = Statement("""
SELECT transaction_id FROM {schema}.pending_check pending
WHERE (%(group)s::text IS NULL OR producer_group = %(group)s) AND (NOT %(parked)s::boolean OR parked_at IS NOT NULL)
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
ORDER BY transaction_id LIMIT %(limit)s
""")

_DROP_DECIDED_PARKED = Statement("""
DELETE FROM {schema}.pending_check
WHERE parked_at IS NOT NULL
  AND EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending_check.transaction_id)
""")

_UNDECIDED_BELOW = Statement("""
SELECT pending.transaction_id, now() < pending.immune_until AS immune
FROM {schema}.pending_check pending JOIN {schema}.commit_log log USING (log_id)
WHERE log.ledger_id = %(ledger_id)s AND pending.transaction_id < %(below)s
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
ORDER BY pending.transaction_id LIMIT %(limit)s
""")

# A function with its owner's rights: a publisher may ask for a check, but may not read or write the tables.
_HINT = Statement("SELECT {schema}.make_checks_due($1, $2)", (UUIDS, INTEGER), (INTEGER,))


@dataclass(frozen=True, slots=True)
class ScanCounts:
    """The results of one scan pass. `more`: unread half messages are left, or may be left."""

    scanned: int = 0
    moved: int = 0
    more: bool = False


def scan_halves(run: Executor, *, immunity_seconds: int, batch: int = DEFAULT_BATCH) -> ScanCounts:
    """Run one bounded scan pass: new undecided half messages get a pending_check row, due when immunity ends.

    Any number of scans may run at once. If two scans read the same part, both try to store the same scan id, and one
    scan gives up.
    """
    scan_id, text = run.one(_LAST)
    snapshot = Snapshot.parse(text)
    parameters = {
        "scan_id": scan_id,
        "xmax": str(snapshot.xmax),
        "xip": xids(snapshot.in_progress),
        "batch": batch,
        "immunity": immunity_seconds,
    }
    try:
        # The statement is not prepared, because a plan made without the values of the snapshot would read the whole
        # log.
        with lifted(run.connection):
            scanned, moved, more = run.one(_SCAN, parameters, prepare=False)
    except UniqueViolation:
        # Another scan has read the same part, and may have left unread half messages.
        return ScanCounts(more=True)
    return ScanCounts(scanned=scanned, moved=moved, more=more)


def drop_decided_parked(run: Executor) -> int:
    """Delete the pending rows of parked transactions that are decided now, and return the number of deleted rows."""
    with lifted(run.connection):
        return run.count(_DROP_DECIDED_PARKED)


@dataclass(frozen=True, slots=True)
class Undecided:
    """A transaction without a decision.

    `immune`: the immunity of the transaction has not ended, so a check must not write a tombstone yet.
    """

    transaction_id: UUID
    immune: bool


def undecided_below(run: Executor, ledger_id: UUID, below: UUID, *, limit: int) -> list[Undecided]:
    """Return the undecided transactions of a ledger that the half scan has found, the lowest ids first."""
    return run.objects(Undecided, _UNDECIDED_BELOW, {"ledger_id": ledger_id, "below": below, "limit": limit})


def hint_checks(run: Executor, ids: Sequence[UUID], *, settings: CheckSettings) -> int:
    """Make undecided transactions (parked ones too) due for a check now, and return the number of these transactions.

    Before the immunity of a transaction ends, such a check writes no tombstone.
    """
    row = first_row(run, _HINT, (list(ids), settings.immunity_seconds))
    assert row is not None
    return int(row[0])


def list_waiting(run: Executor, group: str | None = None, *, parked: bool = False, limit: int) -> list[UUID]:
    """Return up to `limit` undecided transactions that the scan has found, the oldest first.

    With `group`, the list has only transactions of this producer group. With `parked`, the list has only parked
    transactions.
    """
    values = {"group": group, "parked": parked, "limit": limit}
    return [transaction_id for (transaction_id,) in run.rows(_WAITING, values)]


def hint_request(schema: str, transaction_id: UUID, *, settings: CheckSettings) -> Request:
    """Return `hint_checks` for one transaction as a request, for a sender that does not wait for the answer."""
    values = ([transaction_id], settings.immunity_seconds)
    return _HINT.request(schema, values, f"the request for an early check of {transaction_id}")
