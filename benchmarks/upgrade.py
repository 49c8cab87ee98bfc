"""Upgrading the tables under load: how long publishing stalls, how long the upgrade takes, which transactions it ends.

The load uses the tables of version 1: publishers on the atomic path, some of which continue their transaction after
they have published; transactions that use the tables in opposite orders; a sequencer; readers of the queues.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from importlib import resources
from uuid import uuid4

import psycopg

from benchmarks.harness import server, table
from outbox.broker import embedded
from outbox.broker.schema.install import install

REPEATS = int(os.environ.get("OUTBOX_BENCH_REPEATS", "5"))
PUBLISHERS = 8
# Of each eight publishers two hold their transaction open for up to so long after they have published.
HELD_SECONDS = float(os.environ.get("OUTBOX_BENCH_HELD_SECONDS", "0.4"))
STALL_SECONDS = 0.05

_LOG = """
INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
VALUES (now(), %(id)s, %(id)s, 1, false, '', '', 'application/json', '{}') RETURNING log_id
"""
_OP = (
    "INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids) VALUES (%s, 'C', 'P', ARRAY[%s::bigint])"
)
_ORDER = ("consume_queue", "dead_letter", "subscription", "topic", "pending_check", "op_log")
_READ = (
    "SELECT count(*) FROM outbox.consume_queue JOIN outbox.queue USING (queue_id) JOIN outbox.topic USING (topic_id)"
)


class Load:
    """Threads with a connection each, until `stop`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.published: list[tuple[float, float]] = []
        self.ended: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(self._publish, number)) for number in range(PUBLISHERS)
        ]
        self._threads += [
            threading.Thread(target=self._run, args=(one, number))
            for one in (self._cross, self._read)
            for number in range(2)
        ]
        self._threads.append(threading.Thread(target=self._run, args=(self._tick, 0)))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: object, number: int) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.is_set():
                try:
                    work(connection, number)  # type: ignore[operator]
                except psycopg.Error as error:
                    self.ended.append(type(error).__name__)

    def _publish(self, connection: psycopg.Connection, number: int) -> None:
        began = time.monotonic()
        with connection.transaction():
            connection.execute("INSERT INTO business VALUES (1)")
            given = uuid4()
            row = connection.execute(_LOG, {"id": given}).fetchone()
            assert row is not None
            connection.execute(_OP, [given, row[0]])
            took = time.monotonic() - began
            if number % 4 == 0:
                self._stop.wait(random.uniform(0, HELD_SECONDS))
        self.published.append((began, took))
        self._stop.wait(0.005)

    def _cross(self, connection: psycopg.Connection, number: int) -> None:
        with connection.transaction():
            for name in _ORDER[:: 1 if number else -1]:
                connection.execute(f"SELECT count(*) FROM (SELECT FROM outbox.{name} LIMIT 1) AS one".encode())
        self._stop.wait(0.002)

    def _read(self, connection: psycopg.Connection, number: int) -> None:
        connection.execute(_READ)
        self._stop.wait(0.005)

    def _tick(self, connection: psycopg.Connection, number: int) -> None:
        with connection.transaction():
            connection.execute(
                "SELECT count(*) FROM outbox.op_log WHERE xid >= pg_snapshot_xmin(pg_current_snapshot())"
            )
            connection.execute(
                "INSERT INTO outbox.consume_queue (queue_offset, log_id, queue_id, attempt)"
                " SELECT coalesce(max(queue_offset) + 1, 0), 1, 1, 0 FROM outbox.consume_queue WHERE queue_id = 1"
            )
        self._stop.wait(0.005)


def install_first_version(connection: psycopg.Connection) -> None:
    """As version 0.1 left the tables."""
    first = resources.files("outbox.broker.schema").joinpath("changes/0001_initial.sql").read_bytes()
    connection.execute("CREATE SCHEMA outbox; SET search_path TO outbox")
    connection.execute(first)
    connection.execute(
        "INSERT INTO schema_version VALUES (1); RESET search_path; CREATE TABLE business (n integer);"
        "INSERT INTO outbox.topic (name, message_types, queue_count) VALUES ('orders', '{NORMAL}', 1);"
        "INSERT INTO outbox.queue (topic_id, number) VALUES (1, 0)"
    )


def measure(url: str) -> list[float]:
    """Seconds of the upgrade; the longest publish before and during it; stalls; transactions ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        install_first_version(connection)
        load = Load(url)
        load.start()
        try:
            time.sleep(2)
            began = time.monotonic()
            install(connection, "outbox")
            ended = time.monotonic()
            time.sleep(0.5)
        finally:
            load.stop()
    before = [took for at, took in load.published if at < began - 0.5]
    during = [took for at, took in load.published if began - 0.5 <= at < ended]
    return [
        ended - began,
        max(before),
        max(during),
        sum(took > STALL_SECONDS for took in during),
        sum(took for took in during if took > STALL_SECONDS) / PUBLISHERS,
        float(len(load.ended)),
    ]


def main() -> None:
    """Print one row per figure: the median and the worst of the runs."""
    with server() as url:
        runs = [measure(embedded.create_database(url, f"upgrade_{number}")) for number in range(REPEATS)]
    names = (
        "upgrade, seconds",
        "longest publish before, ms",
        "longest publish during, ms",
        f"publishes stalled for more than {STALL_SECONDS * 1000:.0f} ms",
        "stalled time per publisher, ms",
        "live transactions ended",
    )
    rows = []
    for name, values in zip(names, zip(*runs, strict=True), strict=True):
        factor = 1000 if name.endswith("ms") and "more than" not in name else 1
        rows.append((name, f"{statistics.median(values) * factor:.4g}", f"{max(values) * factor:.4g}"))
    table(f"upgrade of version 1 under load, {REPEATS} runs", ("figure", "median", "worst"), rows)


if __name__ == "__main__":
    main()
