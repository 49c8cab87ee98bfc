"""Maintenance by the leader at intervals: half scan, parking, retention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.maintenance import future_times, retention
from outbox.broker.maintenance.retention import RetentionCounts, UnqueuedPlace
from outbox.broker.transaction import checks, parking
from outbox.errors import BrokerUnavailable
from outbox.transaction import CheckSettings
from outbox.utils.periodic import BackgroundLoop


def run_once(
    database: BrokerDatabase,
    check: CheckSettings,
    *,
    stopping: Callable[[], bool] = lambda: False,
    place: UnqueuedPlace | None = None,
) -> RetentionCounts:
    """Run one pass on a separate connection: find undecided half messages, park overdue half messages, and remove rows.

    The pass repeats the removal until no batch is full any more. The pass takes all times from the database's clock.
    Returns the counts of the last round of retention; `more` is True in these counts only if `stopping` ended the pass
    early. `place`: see `retention.run_once`. Raises psycopg.Error or BrokerUnavailable.
    """
    place = place or UnqueuedPlace()
    with contextlib.closing(database.open(name="outbox-maintenance", direct=True)) as connection:
        run = Executor(connection, database.schema)
        checks.scan(run, settings=check)
        future_times.mend(run)
        parking.park_overdue(run, settings=check)
        while (counts := _remove(run, place)).more and not stopping():
            pass
        return counts


def _remove(run: Executor, place: UnqueuedPlace) -> RetentionCounts:
    """Run one round of retention. Disable the timeouts once for the whole round, because it has many statements."""
    if timeouts.lasts(run.connection):
        timeouts.lift_for_session(run.connection)
        return retention.run_once(run, place=place)
    with timeouts.lifted(run.connection):
        return retention.run_once(run, place=place)


def maintenance(database: BrokerDatabase, check: CheckSettings, *, every_seconds: float) -> BackgroundLoop:
    """Return a background loop that runs a pass every `every_seconds`."""
    note, place = FailureNote(database, ProcessPart.MAINTENANCE), UnqueuedPlace()

    def run(stopping: Callable[[], bool]) -> float:
        with note.watching():
            run_once(database, check, stopping=stopping, place=place)
        return every_seconds

    expected = (psycopg.Error, BrokerUnavailable)
    return BackgroundLoop(
        "maintenance", run, every_seconds=every_seconds, first_seconds=every_seconds, expected=expected
    )
