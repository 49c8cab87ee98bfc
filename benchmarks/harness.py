"""Shared helpers of all benchmarks: a server, counters of commits and WAL, medians with their spread."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from benchmarks import results
from outbox.broker import embedded

# Default durability (fsync, synchronous_commit); only sizes that a server of any size would have.
SERVER_SETTINGS = {"max_connections": "200", "shared_buffers": "512MB", "max_wal_size": "8GB"}
# The rule is five runs; fewer give a first look.
REPEATS = int(os.environ.get("OUTBOX_BENCH_REPEATS", "5"))
_printed: list[dict[str, Any]] = []


@contextlib.contextmanager
def server(**settings: str) -> Iterator[str]:
    """The URL of a server for one benchmark run, with further parameters of the server."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "data"
        try:
            yield embedded.server_url(data, settings=SERVER_SETTINGS | settings)
        finally:
            embedded.stop(data)


@dataclass(frozen=True)
class Usage:
    """The activity of a database in a span of time."""

    seconds: float
    commits: int
    wal_bytes: int


@contextlib.contextmanager
def measured(url: str) -> Iterator[Callable[[], Usage]]:
    """Measure the block: call the value after it."""
    with psycopg.connect(url, autocommit=True) as connection:
        commits, lsn, started = _counters(connection)
        stopped: list[Usage] = []

        yield lambda: stopped[0]
        seconds = time.perf_counter() - started
        after_commits, after_lsn, _ = _counters(connection)
        stopped.append(Usage(seconds, after_commits - commits, after_lsn - lsn))


def _counters(connection: psycopg.Connection) -> tuple[int, int, float]:
    """Transactions that wrote something, WAL position, time.

    Writing transactions are counted by the ids they drew, which is exact at once; the server's statistics arrive
    up to ten seconds late. Reading transactions cost no flush and are not counted.
    """
    commits = _one(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    lsn = _one(connection, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
    return commits, lsn, time.perf_counter()


def _one(connection: psycopg.Connection, query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        spec = spec or ",.0f"
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def child_arguments() -> list[str]:
    """The arguments of a script that runs itself again with `--child KIND APPLICATION BROKER`; empty without."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=3, metavar=("KIND", "APPLICATION", "BROKER"), default=[])
    given: list[str] = parser.parse_args().child
    return given


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values are below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, aligned. With OUTBOX_BENCH_STORE, store all tables of the script until now."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        print(
            "  " + "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(),
            flush=True,
        )
    if os.environ.get("OUTBOX_BENCH_STORE"):
        _printed.append({"title": title, "header": list(header), "rows": [list(row) for row in rows]})
        script = sys.modules["__main__"]
        # A script without REPEATS says in its tables how often it measures.
        rounds = getattr(script, "REPEATS", 0)
        durability = getattr(script, "DURABILITY", results.DURABILITY)
        results.store_tables(Path(sys.argv[0]).stem, _printed, rounds=rounds, durability=durability)


def timed(work: Callable[[], object], repeats: int) -> str:
    """Milliseconds, after one that warms up."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1e3)
    return f"{Spread.of(taken):.1f}"
