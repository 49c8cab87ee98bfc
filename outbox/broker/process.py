"""The broker process runs the leader loop on its own connection, and continues after database errors."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Final
from uuid import UUID, uuid4

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements
from outbox.broker.leading import Leader, LeaderSettings
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import next_step
from outbox.errors import BrokerUnavailable, ConfigurationError, SchemaError
from outbox.utils import heartbeat
from outbox.utils.backoff import Backoff
from outbox.utils.safe_text import error_line, printable

logger = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_seconds=0.1, longest_seconds=2.0, healthy_seconds=2.0)
# While the process waits, it checks its stop event at this interval (seconds). The check needs no query.
_STOP_SECONDS: Final = 0.2


def run_broker(database: BrokerDatabase, stop: threading.Event, *, settings: LeaderSettings | None = None) -> None:
    """Run the leader loop until `stop` is set. After each database error, log the error and pause for up to 2 s."""
    owner = uuid4()
    leader = Leader(database, settings=settings)
    failures = 0
    while not stop.is_set():
        started = time.monotonic()
        try:
            _serve(database, stop, owner, leader)
        except (psycopg.Error, BrokerUnavailable, SchemaError, ConfigurationError) as error:
            problem = f"{str(error).strip()}{next_step(error)}"
            leader.note.failed(error)
        except Exception as error:
            logger.error("the broker process failed", exc_info=printable(error))
            problem = error_line(error)
            leader.note.failed(error)
        else:
            continue
        failures = _BACKOFF.failures_in_a_row(failures, ran_seconds=time.monotonic() - started)
        pause = _BACKOFF.pause_seconds(failures)
        heartbeat.beat(ready=False)
        logger.warning("sequencing is interrupted, trying again in %.1f s: %s", pause, problem)
        stop.wait(pause)
    # A process that is stopped has not failed, so its FailureNote is removed.
    leader.note.worked()


def _serve(database: BrokerDatabase, stop: threading.Event, owner: UUID, leader: Leader) -> None:
    with contextlib.closing(database.open(name="outbox-broker", direct=True)) as connection:
        run = Executor(connection, database.schema)
        timeouts.limit_locks_where_direct(connection)
        leader.begin(run, owner)
        check_schema(connection, database.schema)
        announcements = Announcements(connection)
        logger.info("broker process for schema %r is ready", database.schema)
        decided = False
        try:
            while not stop.is_set():
                heartbeat.beat(ready=True)
                leader.lead(run, announcements, decided=decided)
                decided = _wait(leader, announcements, stop)
            leader.end(run, join=True)
        finally:
            leader.interrupted(join=stop.is_set())


def _wait(leader: Leader, announcements: Announcements, stop: threading.Event) -> bool:
    """Wait until the next round of the leader loop. Return whether notifications about decisions may have arrived."""
    seconds = leader.wait_seconds()
    if not leader.leads:
        stop.wait(seconds)
        return False
    if leader.is_gathering:
        stop.wait(seconds)
        return True
    until = time.monotonic() + seconds
    while not stop.is_set():
        remaining = until - time.monotonic()
        if announcements.wait(max(0.0, min(remaining, _STOP_SECONDS))):
            return True
        if remaining <= _STOP_SECONDS:
            return False
    return False
