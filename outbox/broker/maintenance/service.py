"""Maintenance beside the sequencer: half scan, parking, retention; a pass every so often while this process leads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from outbox.broker.maintenance.retention import RetentionCounts
from outbox.broker.transaction import checks, parking
from outbox.errors import BrokerUnavailable
from outbox.transaction import CheckSettings

logger = logging.getLogger(__name__)


def run_once(
    database: BrokerDatabase, check: CheckSettings, *, stopping: Callable[[], bool] = lambda: False
) -> RetentionCounts:
    """One pass on a connection of its own: scan for undecided halves, park what is overdue, then remove until no batch
    is full any more.

    Everything is timed by the database's clock. Returns what the last round of retention removed; `more` is left only
    when `stopping` cut it short. Raises psycopg.Error or BrokerUnavailable.
    """
    with contextlib.closing(database.open(name="outbox-maintenance", direct=True)) as connection:
        run = Executor(connection, database.schema)
        checks.scan(run, settings=check)
        parking.park_overdue(run, settings=check)
        while (counts := _remove(run, lasts=timeouts.lasts(database))).more and not stopping():
            pass
        return counts


def _remove(run: Executor, *, lasts: bool) -> RetentionCounts:
    """One round of retention. It has a statement per queue: timeouts are lifted once for all of them."""
    if lasts:
        timeouts.lift_for_session(run.connection)
        return retention.run_once(run)
    with timeouts.lifted(run.connection):
        return retention.run_once(run)


class MaintenanceService:
    """Runs a pass every `every_seconds` in a thread of its own, from entering the context to leaving it."""

    def __init__(self, database: BrokerDatabase, check: CheckSettings, *, every_seconds: float) -> None:
        self._database = database
        self._check = check
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="outbox-maintenance", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        while not self._ended.wait(self._every_seconds):
            try:
                run_once(self._database, self._check, stopping=self._ended.is_set)
            except (psycopg.Error, BrokerUnavailable) as error:
                logger.warning("maintenance comes again in %.0f s: %s", self._every_seconds, error)
            except Exception:
                # It would end the thread, and nothing would be removed until another process leads.
                logger.exception("maintenance failed")
