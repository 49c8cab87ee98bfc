"""What the goals need, measured once: each part runs all its ways once and returns their values."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
from psycopg.sql import SQL, Identifier

from benchmarks import goal_list as goals
from benchmarks import processes
from benchmarks.bulk import (
    CLAIM,
    DRAIN,
    FIFO_ROW,
    MESSAGES,
    RAW_ROW,
    claim_by,
    drain_joined,
    end_to_end,
    raw_insert_then_delete,
)
from benchmarks.harness import percentile
from benchmarks.peers import ways
from benchmarks.peers.run import Job, Running, one_publish, running
from benchmarks.peers.ways import Way
from benchmarks.web_peers import BEHIND, RATE_PER_SECOND
from outbox.broker import embedded

TRANSACTIONS = int(os.environ.get("OUTBOX_BENCH_TRANSACTIONS", "3000"))
LATENCY_SECONDS = float(os.environ.get("OUTBOX_BENCH_LATENCY_SECONDS", "5"))
LATENCY_THREADS = 4
# How long a snapshot is held; its goals are those of ten minutes (600).
HELD_SECONDS = float(os.environ.get("OUTBOX_BENCH_HELD_SECONDS", "600"))
_BEFORE_SECONDS, _LAST_SECONDS = 20, 60
PAIRS, STRETCH = int(os.environ.get("OUTBOX_BENCH_PAIRS", "10")), 50
WAYS = (*ways.OURS, *ways.FLOORS, ways.RELIABLE, ways.RELIABLE_INBOX, ways.RAW)
# The sizes, as the files name them.
SIZES: dict[str, dict[str, float]] = {
    "web": {
        "transactions": TRANSACTIONS,
        "seconds at 300/s from four threads": LATENCY_SECONDS,
        "pairs of fifty blocks": PAIRS,
    },
    "bulk": {"messages in batches of 500": MESSAGES},
    "age": {"seconds with a held snapshot": HELD_SECONDS},
    "memory": {"messages": 300},
}
# Values of one way, by column; of one part, by row and column.
Columns = dict[str, float]
Values = dict[str, Columns]


def raw_notify(url: str) -> float:
    """The speed of the machine: messages per second of raw psycopg with NOTIFY in the web job."""
    with running(url, ways.RAW, "raw_notify") as it:
        return it.job(min(TRANSACTIONS, 1000)).rate


# -- the web job -----------------------------------------------------------------------------------


def web(url: str, run: int) -> Values:
    """All ways in turn. Each round begins with another one."""
    found: Values = {}
    chosen = [way for way in WAYS if not way.left_out()]
    for way in _rotated(chosen, run):
        with running(url, way, f"web_{run}_{chosen.index(way)}") as it:
            found[way.name] = _job(it)
            if way.inbox and way in (*ways.OURS, *ways.FLOORS):
                found[way.name] |= _blocks(it)
        _progress(way.name, goals.RATE, found[way.name])
    return {way.name: found[way.name] for way in chosen}


def _rotated(chosen: Sequence[Way], run: int) -> Iterator[Way]:
    return (chosen[(run + number) % len(chosen)] for number in range(len(chosen)))


def _job(it: Running) -> Columns:
    job = it.job(TRANSACTIONS)
    steady = it.job(round(RATE_PER_SECOND * LATENCY_SECONDS), threads=LATENCY_THREADS, per_second=RATE_PER_SECOND)
    # Plans and connections are warm; the first half second is the pace finding itself.
    latencies = steady.latencies(after_seconds=0.5)
    return {
        goals.RATE: job.rate,
        goals.P50: percentile(latencies, 0.5),
        goals.P99: percentile(latencies, 0.99),
        goals.WEB_CPU: _cpu(job, "web", "its sessions"),
        goals.BEHIND_CPU: _cpu(job, *BEHIND),
        goals.STEADY_CPU: _cpu(steady, *BEHIND),
        goals.WAL: job.usage.wal_bytes / TRANSACTIONS,
    }


def _cpu(job: Job, *roles: str) -> float:
    """Microseconds per message."""
    return sum(job.cpu[role] for role in roles) / len(job.handled) * 1e6


def _blocks(it: Running) -> Columns:
    """One thread runs stretches of blocks without and with publish in turn, while the worker is stopped."""
    with it.stopped_worker():
        pairs = [(_stretch(it, plain=True), _stretch(it, plain=False)) for _ in range(PAIRS)]
    return {
        goals.PLAIN_BLOCK: statistics.median(plain for plain, _ in pairs),
        goals.BLOCK: statistics.median(publishing for _, publishing in pairs),
        goals.ADDED: statistics.median(publishing - plain for plain, publishing in pairs),
    }


def _stretch(it: Running, *, plain: bool) -> float:
    """Microseconds per block."""
    return statistics.mean(it.job(STRETCH, threads=1, plain=plain, waits=False).blocks.values()) / 1e3


# -- bulk ------------------------------------------------------------------------------------------


def bulk(url: str, run: int) -> Values:
    measures: dict[str, Callable[[str], float]] = {RAW_ROW: raw_insert_then_delete}
    for count in (1, 2, 4):
        measures[CLAIM.format(count)] = claim_by(count)
        measures[DRAIN.format(count)] = drain_joined(count)
    measures[FIFO_ROW] = end_to_end
    found: Values = {}
    for number, (row, measure) in enumerate(measures.items()):
        name = f"bulk_{run}_{number}"
        found[row] = {goals.RATE: measure(embedded.create_database(url, name))}
        # The databases of five rounds would take some gigabytes.
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))
        _progress(row, goals.RATE, found[row])
    return found


# -- age -------------------------------------------------------------------------------------------


# Sessions report what they have changed up to a second late, while they work.
_CHANGED = "SELECT sum(n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables"


def age(url: str, run: int) -> Values:
    """Both paths at 300/s, at first without and then with a snapshot that another transaction holds."""
    found: Values = {}
    for way in (ways.ATOMIC_INBOX, ways.TWO_PHASE_INBOX):
        with running(url, way, f"age_{run}_{len(found)}") as it:
            at_pace = partial(it.job, threads=LATENCY_THREADS, per_second=RATE_PER_SECOND)
            before = at_pace(round(RATE_PER_SECOND * _BEFORE_SECONDS))
            count = round(RATE_PER_SECOND * HELD_SECONDS)
            with it.held_snapshot():
                changed = _changed(it)
                held = at_pace(count)
                dead = _changed(it) - changed
        taken = (max(held.commits.values()) - held.began) / (max(held.handled.values()) - held.began)
        found[way.name] = {
            goals.P99_BEFORE: percentile(before.latencies(after_seconds=_BEFORE_SECONDS / 2), 0.99),
            goals.P99_HELD: percentile(held.latencies(after_seconds=max(0.0, HELD_SECONDS - _LAST_SECONDS)), 0.99),
            goals.HELD_SHARE: taken,
            goals.DEAD_ROWS: 100 * dead / count,
        }
        _progress(way.name, goals.P99_HELD, found[way.name])
    return found


def _changed(it: Running) -> int:
    """How many rows of all tables of a way were updated or deleted until now."""
    time.sleep(1.5)
    total = 0
    for database in {it.application, it.broker}:
        with psycopg.connect(database, autocommit=True) as connection:
            row = connection.execute(_CHANGED).fetchone()
            total += row[0] if row is not None else 0
    return total


# -- memory ----------------------------------------------------------------------------------------


def memory(url: str, run: int) -> Values:
    """Workers, each after 500 messages; web processes after one block with and without outbox."""
    found: Values = {}
    for kind, way in zip(goals.KINDS, (ways.ATOMIC_INBOX, ways.ATOMIC), strict=True):
        row = goals.WORKER.format(kind)
        with running(url, way, f"memory_{run}_{len(found)}") as it:
            it.job(int(SIZES["memory"]["messages"]))
            found[row] = {goals.MEMORY: sum(_rss(one.pid) for one in processes.tree(it.worker.pid))}
        _progress(row, goals.MEMORY, found[row])
    web = {goals.WEB.format(goals.KINDS[0]): ways.ATOMIC_INBOX, goals.WEB.format(goals.KINDS[1]): ways.ATOMIC}
    for name, way in (web | {goals.NO_OUTBOX: ways.PLAIN_DJANGO}).items():
        with TemporaryDirectory(prefix="outbox-bench-") as folder:
            with one_publish(url, way, f"memory_{run}_{len(found)}", Path(folder)) as process:
                found[name] = {goals.MEMORY: _rss(process.pid)}
        _progress(name, goals.MEMORY, found[name])
    return found


def _rss(pid: int) -> float:
    """Megabytes; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0][1]) * 1024 / 1e6 if lines else 0.0


def _progress(row: str, column: str, values: Columns) -> None:
    print(f"  {time.strftime('%H:%M:%S')}  {row}: {values[column]:,.4g} {column}", flush=True)


PARTS: dict[str, Callable[[str, int], Values]] = {"web": web, "bulk": bulk, "memory": memory, "age": age}
