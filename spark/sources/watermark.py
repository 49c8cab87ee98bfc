"""The watermark of a PostgreSQL database: the start of the oldest transaction that may still add rows.

For a replica, the run reads the open transactions of its primary. The run uses these open transactions only if the
replica has replayed all transactions that had ended on the primary at the time of this read
(docs/decisions/040-the-watermark-of-a-replica.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from ..common.errors import RunIncomplete, UsageProblem
from ..rules.rule import DatabaseRule
from . import adbc

# PostgreSQL shows when a transaction was prepared, but not when it began. The run assumes that the transaction began
# this much time before it was prepared.
PREPARED_MARGIN: Final = timedelta(hours=1)
_NOTEWORTHY: Final = timedelta(minutes=5)

# A transaction that was open before the snapshot may still add rows with older times. So the watermark is not after the
# start of the oldest open transaction, whether of a client or of a background worker. The query runs before the
# snapshot is taken. If a transaction ends between the query and the snapshot, the snapshot shows its rows. If a
# transaction begins between the query and the snapshot, it begins after the watermark. If the role may not see a
# session, the session's `backend_type` and `xact_start` are null. The query ignores the transactions of this package,
# which only read, and recognises them by their lock.
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
# A run reads the position of the WAL after the query OLDEST. So all transactions that had ended when OLDEST ran have
# their end in the WAL before this position.
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


def of_server(database: DatabaseRule, activity: Activity) -> Completeness:
    """The watermark of a primary. Raises RunIncomplete if the role cannot see all sessions.

    If the function guessed a watermark, the run would read rows and messages while transactions are still open, and
    report false findings.
    """
    if activity.hidden and not database.watermark:
        raise RunIncomplete(
            f"database {database.name!r}: {activity.hidden} sessions are hidden from this role, so the run cannot "
            f"tell which rows their open transactions may still add. GRANT pg_read_all_stats to the role, or write "
            f"watermark in [database.{database.name}]."
        )
    notes, watermark = [], min(activity.now, activity.oldest or activity.now)
    if activity.prepared is not None:
        watermark = min(watermark, activity.prepared - PREPARED_MARGIN)
        notes.append(
            f"a transaction that was prepared at {activity.prepared.isoformat()} is still open, so a later run "
            f"judges the rows since its start (which is not known, and assumed to be an hour before the prepare)"
        )
    if activity.appliers:
        notes.append(
            "this database receives rows by logical replication: `grace` must be longer than the lag of the replication"
        )
    if activity.oldest is not None and activity.now - activity.oldest > _NOTEWORTHY:
        notes.append(
            f"a transaction has been open since {activity.oldest.isoformat()}: a later run judges the rows from this "
            f"time on"
        )
    return Completeness(watermark, notes)


def of_replica(database: DatabaseRule, activity: Activity, primary: Completeness | None) -> Completeness:
    """The watermark of a replica, with its notes. `primary` has the watermark of the primary. `primary` is None if the
    rules name no primary, or if the replica has not replayed all transactions that had ended on the primary. If
    `primary` is None and the rules give no watermark, the run assumes that no open transaction of the primary is older
    than `longest_transaction`.
    """
    if primary is not None:
        return Completeness(primary.watermark, [*primary.notes, "a replica: its primary shows the open transactions"])
    replayed = activity.replayed or datetime.fromtimestamp(0, UTC)
    if database.watermark:
        return Completeness(replayed, [f"a replica, replayed up to {replayed.isoformat()}"])
    longest = timedelta(seconds=database.longest_transaction_seconds)
    reason = (
        f"write primary = … in [database.{database.name}]"
        if database.primary is None
        else f"the replica has not replayed all transactions that had ended on {database.primary.name!r}"
    )
    note = (
        f"a replica, replayed up to {replayed.isoformat()}: the run does not know which transactions of the primary "
        f"are open ({reason}), so a later run judges the rows of the last {longest} (longest_transaction)"
    )
    return Completeness(replayed - longest, [note])


def check_primary(database: DatabaseRule, primary: Activity, replica: Activity, identities: tuple[str, str]) -> None:
    """Raise UsageProblem if `primary` is not the primary of `replica`. If the identity of one server is unknown (''),
    the function does not compare the identities."""
    assert database.primary is not None
    ours, theirs = identities
    if primary.is_replica or primary.name != replica.name or (ours and theirs and ours != theirs):
        what = "is a replica itself" if primary.is_replica else "is another database"
        raise UsageProblem(
            f"database {database.name!r} is a replica, but its primary {database.primary.name!r} {what}. Correct "
            f"primary in [database.{database.name}]."
        )
