"""The watermark of a PostgreSQL database: the start of the oldest transaction that may still add rows.

A replica does not show the open transactions of its primary, so the run assumes how long they last
(docs/decisions/040-the-watermark-of-a-replica.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from ..common.errors import RunIncomplete
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


def of(database: DatabaseRule, activity: Activity) -> tuple[datetime, list[str]]:
    """The watermark of a database, and notes with the reason why it is not later.

    Raises RunIncomplete if the role cannot see all sessions. If the function guessed a watermark, the run would read
    rows and messages while transactions are still open, and report false findings.
    """
    if activity.is_replica:
        return _of_replica(database, activity)
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
    return watermark, notes


def _of_replica(database: DatabaseRule, activity: Activity) -> tuple[datetime, list[str]]:
    """Without a watermark in the rules, the run assumes that no open transaction of the primary is older than
    `longest_transaction`."""
    replayed = activity.replayed or datetime.fromtimestamp(0, UTC)
    if database.watermark:
        return replayed, [f"a replica, replayed up to {replayed.isoformat()}"]
    longest = timedelta(seconds=database.longest_transaction_seconds)
    note = (
        f"a replica, replayed up to {replayed.isoformat()}: the run does not know which transactions of the primary "
        f"are open, so a later run judges the rows of the last {longest} (longest_transaction)"
    )
    return replayed - longest, [note]
