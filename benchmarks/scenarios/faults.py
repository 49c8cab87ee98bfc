"""The seven scenarios: what happens to the system, its server or its neighbours while the load goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from benchmarks.scenarios.cell import Target

_KILL_SECONDS = 2.0
_TERMINATE_SECONDS = 1.0
_TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_READERS = 4
_READER_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Scenario:
    """`fault` runs until a point of the monotonic clock. After one that `interrupts`, messages may come again."""

    name: str
    fault: Callable[[Target, float], None]
    interrupts: bool = False


def repeated_kills(target: Target, until: float) -> None:
    """kill -9 of the worker and of its processes, again and again; its supervisor starts it again at once."""
    while time.monotonic() < until:
        target.worker.kill()
        _sleep(min(until, time.monotonic() + _KILL_SECONDS))


def restart(target: Target, until: float) -> None:
    """An immediate restart of the server, which recovers from its WAL."""
    target.crash_server()
    _sleep(until)


def killed_sessions(target: Target, until: float) -> None:
    """pg_terminate_backend of every session of the database, again and again."""
    while time.monotonic() < until:
        target.admin.execute(_TERMINATE)
        _sleep(min(until, time.monotonic() + _TERMINATE_SECONDS))


def exhausted_connections(target: Target, until: float) -> None:
    """Every connection that the server has left is taken, also one that the system closes meanwhile."""
    with contextlib.ExitStack() as held:
        while time.monotonic() < until:
            try:
                held.enter_context(contextlib.closing(psycopg.connect(target.url, autocommit=True)))
            except psycopg.OperationalError:
                time.sleep(0.1)


def held_snapshot(target: Target, until: float) -> None:
    """A transaction with an id and a snapshot stays open."""
    with psycopg.connect(target.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT pg_current_xact_id(), count(*) FROM scenario_order")
        _sleep(until)


def active_readers(target: Target, until: float) -> None:
    """Four sessions read all tables of the system and of the application, each pass in one snapshot."""
    threads = [threading.Thread(target=_read, args=(target.url, target.tables, until)) for _ in range(_READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read(url: str, tables: Sequence[str], until: float) -> None:
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        while time.monotonic() < until:
            for table in (*tables, "public.scenario_order", "public.scenario_effect"):
                name = sql.Identifier(*table.split("."))
                connection.execute(sql.SQL("SELECT count(it), sum(length(it::text)) FROM {} AS it").format(name))
            connection.rollback()
            time.sleep(_READER_PAUSE_SECONDS)


def high_load(target: Target, until: float) -> None:
    """Twice the steady rate."""
    target.set_rate(2 * target.rate)
    _sleep(until)
    target.set_rate(target.rate)


def _sleep(until: float) -> None:
    time.sleep(max(until - time.monotonic(), 0))


def kill_server(postmaster: int) -> None:
    """End the server without a checkpoint, as `pg_ctl stop -m immediate` does."""
    os.kill(postmaster, signal.SIGQUIT)
    while Path(f"/proc/{postmaster}").exists():
        time.sleep(0.02)


HELD = Scenario("held snapshot", held_snapshot)
SCENARIOS = (
    Scenario("repeated kills", repeated_kills, interrupts=True),
    Scenario("restart", restart, interrupts=True),
    Scenario("killed sessions", killed_sessions, interrupts=True),
    Scenario("exhausted connections", exhausted_connections, interrupts=True),
    HELD,
    Scenario("active readers", active_readers),
    Scenario("high load", high_load),
)
