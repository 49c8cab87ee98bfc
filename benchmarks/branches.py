"""An order and its downstream branches (logistics, points, cart …), each with a database of its own, three ways.

`xa`: every branch is prepared (PREPARE TRANSACTION), the order commits with the coordinator's decision, every branch is
committed. `messages`: the order commits with one message, a subscriber per branch writes there, with the inbox.
`naive`: the order commits, then the message is sent; subscribers without inbox. The process that takes the requests is
killed in the middle of a second run of each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from benchmarks.branches_processes import REQUESTS, STOCK_ROWS, THREADS
from benchmarks.bulk import process
from benchmarks.harness import REPEATS, Spread, percentile, server, table
from outbox.broker import embedded

WAYS = ("xa", "messages", "naive")
BRANCHES = tuple(int(number) for number in os.environ.get("OUTBOX_BENCH_BRANCHES", "1,4,8").split(","))
KILL_AFTER_REQUESTS = 300
TABLES = f"""
CREATE TABLE stock (id integer PRIMARY KEY, sold integer NOT NULL DEFAULT 0);
INSERT INTO stock (id) SELECT generate_series(1, {STOCK_ROWS});
CREATE TABLE applied (order_id uuid NOT NULL)
"""


@dataclass(frozen=True)
class Timings:
    """The measurements of the process that takes the requests: rate, seconds of each request, and of each lock."""

    rate: float
    requests: list[float]
    locks: list[float]


@dataclass(frozen=True)
class Result:
    """One run: rates and milliseconds, then what was wrong after a kill."""

    rate: float
    p50: float
    p99: float
    lock: float
    missing: int
    invented: int
    doubled: int
    in_doubt: int


def main() -> None:
    print(f"\nbranches: {REQUESTS:,} orders by {THREADS} threads, {REPEATS} runs; each way is also killed once per run")
    rows = []
    # Prepared transactions of a killed coordinator stay until the end.
    with server(max_prepared_transactions="1000", max_connections="400") as url:
        for count in BRANCHES:
            results = {way: [measure(url, way, count, run) for run in range(REPEATS)] for way in WAYS}
            rows += [row(count, way, results[way]) for way in WAYS]
    table(
        "an order with its branches (median, low to high; the last four columns: sums over the runs with a kill)",
        [
            *("branches", "way", "requests/s", "request p50 ms", "p99 ms", "row locked in a branch, ms"),
            *("effects missing", "invented", "doubled", "prepared and left"),
        ],
        rows,
    )


def row(count: int, way: str, results: Sequence[Result]) -> list[str]:
    """A line of the table."""
    spreads = [Spread.of([getattr(item, name) for item in results]) for name in ("rate", "p50", "p99", "lock")]
    sums = [sum(getattr(item, name) for item in results) for name in ("missing", "invented", "doubled", "in_doubt")]
    return [str(count), way, f"{spreads[0]}", *(f"{item:,.2f}" for item in spreads[1:]), *map(str, sums)]


def measure(url: str, way: str, count: int, run: int) -> Result:
    """One undisturbed run, and one whose requests are killed in the middle."""
    name = f"branches_{count}_{way}_{run}"
    with stage(url, name, way, count) as (order_url, branch_urls):
        timings = drive(order_url, branch_urls, way)
        assert timings is not None
        wait_until_applied(order_url, branch_urls)
        lock = percentile(locks(order_url, way, timings), 0.5) * 1e3
    with stage(url, f"{name}_killed", way, count) as (order_url, branch_urls):
        drive(order_url, branch_urls, way, kill=True)
        missing, invented, doubled, in_doubt = outcome(order_url, branch_urls)
    return Result(
        rate=timings.rate,
        p50=percentile(timings.requests, 0.5) * 1e3,
        p99=percentile(timings.requests, 0.99) * 1e3,
        lock=lock,
        missing=missing,
        invented=invented,
        doubled=doubled,
        in_doubt=in_doubt,
    )


@contextmanager
def stage(url: str, name: str, way: str, count: int) -> Iterator[tuple[str, list[str]]]:
    """Databases for one run, with the broker and the subscribers where the way needs them."""
    order_url = embedded.create_database(url, name)
    branch_urls = [embedded.create_database(url, f"{name}_b{number}") for number in range(count)]
    with psycopg.connect(order_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE placed (id uuid PRIMARY KEY); CREATE TABLE locked (seconds float8 NOT NULL)")
    for branch in branch_urls:
        with psycopg.connect(branch, autocommit=True) as connection:
            connection.execute(TABLES)
    if way == "xa":
        yield order_url, branch_urls
        return
    command = [sys.executable, "-m", "benchmarks.branches_processes", "--child"]
    joined = ",".join(branch_urls)
    with subprocess.Popen(
        [*command, f"consumer:{way}", order_url, joined], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        with process("outbox.broker", order_url):
            yield order_url, branch_urls
        running.terminate()


def drive(order_url: str, branch_urls: list[str], way: str, *, kill: bool = False) -> Timings | None:
    """Run the process that takes the requests; with `kill`, end it by SIGKILL when a quarter is done."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.branches_processes",
        "--child",
        f"requests:{way}",
        order_url,
        ",".join(branch_urls),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.stdin.write("go\n")
        running.stdin.flush()
        if kill:
            with psycopg.connect(order_url, autocommit=True) as connection:
                while number(connection, "SELECT count(*) FROM placed") < KILL_AFTER_REQUESTS:
                    time.sleep(0.01)
            running.send_signal(signal.SIGKILL)
            return None
        timings = Timings(**json.loads(running.stdout.readline()))
        running.stdin.close()
    return timings


def number(connection: psycopg.Connection, query: str) -> int:
    """The one number of a query."""
    [found] = connection.execute(query.encode()).fetchone() or (0,)
    return int(found)


def applied(branch_url: str) -> list[object]:
    """The orders a branch has taken effect for."""
    with psycopg.connect(branch_url, autocommit=True) as connection:
        return [order for (order,) in connection.execute("SELECT order_id FROM applied")]


def placed(order_url: str) -> set[object]:
    """The orders that committed."""
    with psycopg.connect(order_url, autocommit=True) as connection:
        return {order for (order,) in connection.execute("SELECT id FROM placed")}


def wait_until_applied(order_url: str, branch_urls: Sequence[str], within_seconds: float = 60) -> None:
    """Until all branches have what was ordered, or it takes too long: then something is missing, and is counted."""
    expected, until = len(placed(order_url)), time.monotonic() + within_seconds
    while time.monotonic() < until and any(len(applied(branch)) < expected for branch in branch_urls):
        time.sleep(0.05)


def outcome(order_url: str, branch_urls: Sequence[str]) -> tuple[int, int, int, int]:
    """Missing, invented and doubled effects after a kill, and transactions that were left prepared."""
    wait_until_applied(order_url, branch_urls, within_seconds=5)
    orders = placed(order_url)
    effects = [applied(branch) for branch in branch_urls]
    with psycopg.connect(order_url, autocommit=True) as connection:
        in_doubt = "SELECT count(*) FROM pg_prepared_xacts WHERE database LIKE current_database() || '_b%%'"
        left = number(connection, in_doubt)
    return (
        sum(len(orders - set(found)) for found in effects),
        sum(len(set(found) - orders) for found in effects),
        sum(len(found) - len(set(found)) for found in effects),
        left,
    )


def locks(order_url: str, way: str, timings: Timings) -> list[float]:
    """For how long a row of a branch stayed locked, in seconds."""
    if way == "xa":
        return timings.locks
    with psycopg.connect(order_url, autocommit=True) as connection:
        return [seconds for (seconds,) in connection.execute("SELECT seconds FROM locked")]


if __name__ == "__main__":
    main()
