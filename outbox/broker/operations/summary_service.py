"""Refreshing the summary while this process leads, at a pace that the counting itself sets."""

from __future__ import annotations

import contextlib
import logging
import threading

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.operations import summary
from outbox.errors import BrokerUnavailable

logger = logging.getLogger(__name__)


def run_once(database: BrokerDatabase) -> float:
    """One refresh on a connection of its own; returns how long counting took, in seconds.

    Raises psycopg.Error or BrokerUnavailable.
    """
    with contextlib.closing(database.open(name="outbox-summary", direct=True)) as connection:
        if timeouts.lasts(database):
            timeouts.lift_for_session(connection)
        return summary.refresh(Executor(connection, database.schema)).took_seconds


class SummaryService:
    """Refreshes at once and then every `every_seconds` in a thread, from entering the context to leaving it."""

    def __init__(self, database: BrokerDatabase, *, every_seconds: float) -> None:
        self._database = database
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="outbox-summary", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            pause = self._every_seconds
            try:
                pause = max(pause, run_once(self._database) / summary.SHARE)
            except (psycopg.Error, BrokerUnavailable) as error:
                logger.warning("the summary comes again in %.0f s: %s", pause, error)
            except Exception:
                # It would end the thread, and every status would count by itself.
                logger.exception("counting the summary failed")
