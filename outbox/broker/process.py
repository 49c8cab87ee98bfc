"""The broker process: it tries to lead, sequences after wake-ups, and survives database failures."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID, uuid4

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, listen, unlisten
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.maintenance.service import maintenance
from outbox.broker.operations.summary_service import summaries
from outbox.broker.schema.install import check_schema
from outbox.broker.sequencer.leader import DEFAULT_TERM_SECONDS, LeaderLease
from outbox.broker.sequencer.sequencer import Sequencer, TickCounts
from outbox.errors import BrokerUnavailable, ConfigurationError, SchemaError
from outbox.transaction import CheckSettings
from outbox.utils import heartbeat, measures
from outbox.utils.backoff import Backoff
from outbox.utils.periodic import BackgroundLoop

logger = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_seconds=0.1, longest_seconds=2.0, healthy_seconds=2.0)
# The interval at which a waiting process looks at its stop event; it does not query the database for that.
_STOP_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Times of the broker process, in seconds.

    `poll`: the longest wait between two looks at the database. `pace`: the least time between two ticks under load
    (`gathers`). `stands_in`: leads only while no consumer process leads (outbox/broker/leading.py).
    """

    lease_term_seconds: float = DEFAULT_TERM_SECONDS
    poll_seconds: float = 1.0
    pace_seconds: float = 0.005
    maintenance_seconds: float = 30.0
    summary_seconds: float = 5.0
    check: CheckSettings = field(default_factory=CheckSettings)
    stands_in: bool = False


def run_broker(database: BrokerDatabase, stop: threading.Event, *, settings: ProcessSettings | None = None) -> None:
    """Run until `stop` is set. Logs database errors and pauses after each, increasingly up to 2 s."""
    settings = settings or ProcessSettings()
    owner = uuid4()
    note = FailureNote(database, ProcessPart.SEQUENCING)
    failures = 0
    while not stop.is_set():
        started = time.monotonic()
        try:
            _serve(database, stop, owner, settings, note)
        except (psycopg.Error, BrokerUnavailable) as error:
            problem = str(error).strip()
            note.failed(error)
        except (SchemaError, ConfigurationError) as error:
            problem = str(error)
            note.failed(error)
        except Exception as error:
            logger.exception("the broker process failed")
            problem = f"{type(error).__name__}: {error}"
            note.failed(error)
        else:
            continue
        failures = _BACKOFF.failures_in_a_row(failures, ran_seconds=time.monotonic() - started)
        pause = _BACKOFF.pause_seconds(failures)
        heartbeat.beat(ready=False)
        logger.warning("sequencing is interrupted, trying again in %.1f s: %s", pause, problem)
        stop.wait(pause)
    # A process that ends on purpose does not count as a failing one.
    note.worked()


def _serve(
    database: BrokerDatabase, stop: threading.Event, owner: UUID, settings: ProcessSettings, note: FailureNote
) -> None:
    with contextlib.closing(database.open(name="outbox-broker", direct=True)) as connection:
        if timeouts.lasts(connection):
            timeouts.lift_for_session(connection)
        else:
            timeouts.lift_where_direct(connection)
        run = Executor(connection, database.schema)
        check_schema(connection, database.schema)
        announcements = Announcements(connection)
        lease = LeaderLease(
            database.schema, owner, term_seconds=settings.lease_term_seconds, stands_in=settings.stands_in
        )
        sequencer = Sequencer(database, owner, check=settings.check)
        logger.info("broker process for schema %r is ready", database.schema)
        while not stop.is_set():
            heartbeat.beat(ready=True)
            remaining = lease.hold(connection)
            if remaining:
                note.worked()
                stop.wait(min(remaining, settings.poll_seconds))
                continue
            with _background(database, stop, settings), _listening(run):
                _lead(run, stop, lease, sequencer, announcements, settings, note)
        lease.release(connection)


@contextlib.contextmanager
def _background(database: BrokerDatabase, stop: threading.Event, settings: ProcessSettings) -> Iterator[None]:
    """The leader's other work. After losing leadership, do not join the background loops:

    this process may become leader again immediately.
    """
    loops = leaders_loops(database, settings)
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.stop()
        for loop in loops if stop.is_set() else []:
            loop.join()


def leaders_loops(database: BrokerDatabase, settings: ProcessSettings) -> list[BackgroundLoop]:
    """Return the leader's background loops, not started yet."""
    return [
        maintenance(database, settings.check, every_seconds=settings.maintenance_seconds),
        summaries(database, every_seconds=settings.summary_seconds),
    ]


@contextlib.contextmanager
def _listening(run: Executor) -> Iterator[None]:
    if not timeouts.lasts(run.connection):
        yield
        return
    listen(run, Channel.DECIDED)
    yield
    unlisten(run, Channel.DECIDED)


def _lead(
    run: Executor,
    stop: threading.Event,
    lease: LeaderLease,
    sequencer: Sequencer,
    announcements: Announcements,
    settings: ProcessSettings,
    note: FailureNote,
) -> None:
    logger.info("leading the broker in schema %r", run.schema)
    while not stop.is_set():
        heartbeat.beat(ready=True)
        if lease.hold(run.connection):
            if settings.stands_in:
                logger.info("a consumer process leads; this one stands in for it")
            else:
                logger.warning("another process leads now")
            return
        started = time.monotonic()
        counts = tick(run, lease, sequencer)
        if counts.collided:
            continue
        note.worked()
        if counts.more:
            continue
        if gathers(counts):
            _pause(settings.pace_seconds - (time.monotonic() - started), run, announcements, stop)
        _wait(announcements, stop, idle_seconds(counts, settings))


def tick(run: Executor, lease: LeaderLease, sequencer: Sequencer) -> TickCounts:
    """Run one tick and record its duration. After a collision, check the leader lease again."""
    started = time.monotonic()
    counts = sequencer.run_once(run.connection)
    if counts.collided:
        lease.ask_again()
    if counts.ticked and measures.recorder is not None:
        measures.recorder.ticked(time.monotonic() - started, counts.appended)
    return counts


def gathers(counts: TickCounts) -> bool:
    """Whether the next tick should wait some milliseconds for more decisions.

    That is so under load: one tick per message costs several times as much as one tick for some messages. Single
    messages that arrive during a tick are no load; waiting would delay each until the next tick.
    """
    return counts.decisions > 1 and not counts.more


def idle_seconds(counts: TickCounts, settings: ProcessSettings) -> float:
    """Return how long after a tick the next one runs without a notification."""
    waits = [settings.poll_seconds, settings.lease_term_seconds / 3]
    if counts.next_due_seconds is not None:
        waits.append(max(0.0, counts.next_due_seconds))
    return min(waits)


def _pause(seconds: float, run: Executor, announcements: Announcements, stop: threading.Event) -> None:
    if seconds > 0 and announcements.pending(Channel.DECIDED.name_in(run.schema)):
        stop.wait(seconds)


def _wait(announcements: Announcements, stop: threading.Event, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not stop.is_set():
        remaining = until - time.monotonic()
        if announcements.wait(max(0.0, min(remaining, _STOP_SECONDS))) or remaining <= _STOP_SECONDS:
            return
