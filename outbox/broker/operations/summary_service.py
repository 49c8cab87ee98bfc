"""Refresh the summary while this process leads, at a pace that depends on the duration of counting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.operations import summary
from outbox.errors import BrokerUnavailable
from outbox.utils.periodic import BackgroundLoop


def run_once(database: BrokerDatabase) -> float:
    """Refresh once on a separate connection; returns how long counting took, in seconds.

    Raises psycopg.Error or BrokerUnavailable.
    """
    with contextlib.closing(database.open(name="outbox-summary", direct=True)) as connection:
        if timeouts.lasts(connection):
            timeouts.lift_for_session(connection)
        else:
            timeouts.lift_where_direct(connection)
        return summary.refresh(Executor(connection, database.schema)).took_seconds


def summaries(database: BrokerDatabase, *, every_seconds: float) -> BackgroundLoop:
    """Refresh at once and then every `every_seconds`, or more rarely if counting takes long, in the background."""
    note = FailureNote(database, ProcessPart.SUMMARY)

    def run(stopping: Callable[[], bool]) -> float:
        with note.watching():
            return max(every_seconds, run_once(database) / summary.SHARE)

    expected = (psycopg.Error, BrokerUnavailable)
    return BackgroundLoop("summary", run, every_seconds=every_seconds, first_seconds=0.0, expected=expected)
