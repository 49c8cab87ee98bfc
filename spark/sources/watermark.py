"""The watermark of a PostgreSQL database: the start of the oldest transaction that may still add rows.

For a replica, the open transactions of its primary count. The replica must have replayed all transactions that had
ended on the primary (docs/decisions/040-the-watermark-of-a-replica.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ..common.errors import RunIncomplete, UsageProblem
from ..rules.rule import DatabaseRule
from . import adbc

# PostgreSQL shows when a transaction was prepared, but not when it began. The run assumes that it began this much
# earlier.
PREPARED_MARGIN: Final = timedelta(hours=1)
_NOTEWORTHY: Final = timedelta(minutes=5)

# A transaction that was open before the snapshot may still add rows with older times. So the watermark is not after the
# start of the oldest open transaction, of a client or of a background worker. The query runs before the snapshot is
# taken. If a transaction ends between the query and the snapshot, the snapshot shows its rows. If a transaction begins
# between the query and the snapshot, it begins after the watermark. For a session that the role may not see, all
# columns except its names are null. The transactions of this package only read and do not count; the query recognises
# them by their lock.
OLDEST: Final = f"""
SELECT statement_timestamp(), min(a.xact_start),
       count(*) FILTER (WHERE a.backend_type IS NULL),
       count(*) FILTER (WHERE a.backend_type LIKE 'logical replication%'),
       (SELECT min(p.prepared) FROM pg_prepared_xacts p WHERE p.database = current_database()),
       pg_is_in_recovery(), pg_last_xact_replay_timestamp(), current_database()::text
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND coalesce(a.backend_type, '') NOT IN ('autovacuum worker', 'parallel worker', 'walsender')
  AND NOT EXISTS (SELECT FROM pg_locks l
                  WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.classid = {adbc.LOCK_CLASS} AND l.granted)
"""
# The position of the WAL. A run reads it after the query OLDEST, so all transactions that had ended when OLDEST ran end
# below this position.
WRITTEN: Final = "SELECT pg_current_wal_insert_lsn()::text"
REPLAYED: Final = "SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"


@dataclass(frozen=True, slots=True)
class Activity:
    """The result row of the query OLDEST."""

    now: datetime
    oldest: datetime | None
    hidden: int
    appliers: int
    prepared: datetime | None
    is_replica: bool
    replayed: datetime | None
    name: str


@dataclass(frozen=True, slots=True)
class Completeness:
    """A watermark, and notes with the reason why the watermark is not later."""

    watermark: datetime
    notes: list[str]


def of_row(row: tuple[Any, ...]) -> Activity:
    """The values of a result row of OLDEST."""
    return Activity(*row)


def of_server(database: DatabaseRule, activity: Activity) -> Completeness:
    """The watermark of a primary. Raises RunIncomplete if the role cannot see all sessions.

    With a guessed watermark, the run would report rows or messages of open transactions as findings.
    """
    if activity.hidden and not database.watermark:
        raise RunIncomplete(
            f"database {database.name!r}: {activity.hidden} sessions are hidden from this role, so what their open "
            f"transactions may still add cannot be known. GRANT pg_read_all_stats to the role, or write watermark "
            f"in [database.{database.name}]."
        )
    notes, watermark = [], min(activity.now, activity.oldest or activity.now)
    if activity.prepared is not None:
        watermark = min(watermark, activity.prepared - PREPARED_MARGIN)
        notes.append(
            f"a transaction prepared at {activity.prepared.isoformat()} holds the watermark back; when it began is not "
            f"known, an hour before is assumed"
        )
    if activity.appliers:
        notes.append("it receives rows by logical replication: the grace period must be longer than its lag")
    if activity.oldest is not None and activity.now - activity.oldest > _NOTEWORTHY:
        notes.append(f"a transaction open since {activity.oldest.isoformat()} holds the watermark back")
    return Completeness(watermark, notes)


def of_replica(database: DatabaseRule, activity: Activity, primary: Completeness | None) -> Completeness:
    """The completeness of a replica. `primary` is given if the replica has replayed all transactions that had ended on
    its primary.

    If `primary` is None, the rules declare how long the primary's transactions may be open.
    """
    if primary is not None:
        return Completeness(primary.watermark, [*primary.notes, "a replica: open transactions are its primary's"])
    replayed = activity.replayed or datetime.fromtimestamp(0, UTC)
    if database.watermark:
        return Completeness(replayed, [f"a replica, replayed up to {replayed.isoformat()}"])
    longest = timedelta(seconds=database.longest_transaction_seconds)
    reason = (
        f"write primary = … in [database.{database.name}]"
        if database.primary is None
        else f"it has not replayed yet what had ended on {database.primary.name!r}"
    )
    note = (
        f"a replica, replayed up to {replayed.isoformat()}: which transactions of its primary are open is not known "
        f"({reason}), so rows of the last {longest} (longest_transaction) are judged later"
    )
    return Completeness(replayed - longest, [note])


def check_primary(database: DatabaseRule, primary: Activity, replica: Activity, identities: tuple[str, str]) -> None:
    """Raise UsageProblem unless `primary` is the primary of `replica`; an unknown identity ('') is accepted."""
    assert database.primary is not None
    ours, theirs = identities
    if primary.is_replica or primary.name != replica.name or (ours and theirs and ours != theirs):
        what = "is a replica itself" if primary.is_replica else "is another database"
        raise UsageProblem(
            f"database {database.name!r} is a replica, but its primary {database.primary.name!r} {what}. Correct "
            f"primary in [database.{database.name}]."
        )
