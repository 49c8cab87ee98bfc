"""A transaction that is held open: throughput of delayed and retried messages with it and without it, and dead rows.

Half of the messages are delayed by half a second; one in five fails once and is retried half a second later. The open
transaction has a snapshot and an id, so nothing that is deleted meanwhile can be cleaned up: each row that is updated
or deleted leaves one dead row behind.
OUTBOX_BENCH_HELD_SECONDS is the time it is open; the time without it is the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg

from benchmarks.bulk import BODY, process
from benchmarks.harness import REPEATS, Spread, server, table
from benchmarks.peers import record
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.message import Message
from outbox.topic import MessageType, Topic

SECONDS = float(os.environ.get("OUTBOX_BENCH_HELD_SECONDS", "60"))
TOPIC = "topic-1"
DELAY_SECONDS = 0.5
# So many are under way: half a second or two of waiting must not be the limit.
_UNDER_WAY = min(2_000, round(100 * SECONDS))
_BATCH = 50
_STALL_SECONDS = 60


@dataclass
class Producer:
    """Keeps messages under way; `handled` is read from the file that the handlers write."""

    broker: PostgresBroker
    calls: Path
    sent: int = 0
    last_progress: tuple[int, float] = field(default_factory=lambda: (0, time.monotonic()))

    def warm_up(self) -> None:
        """Until as many have come round as are under way, twice."""
        while self._handled() < 2 * _UNDER_WAY:
            self._keep_up()

    def run(self, seconds: float) -> tuple[int, int]:
        """Send for so long; begin and end in ns since 1970."""
        began = time.time_ns()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._keep_up()
        return began, time.time_ns()

    def _keep_up(self) -> None:
        if self.sent - self._handled() < _UNDER_WAY:
            self._send()
        else:
            time.sleep(0.005)

    def _send(self) -> None:
        delay = timedelta(seconds=DELAY_SECONDS)
        self.broker.send([Message(topic=TOPIC, body=BODY, delay=delay if n % 2 else None) for n in range(_BATCH)])
        self.sent += _BATCH

    def _handled(self) -> int:
        count = self.calls.stat().st_size // record.size_of(1) if self.calls.exists() else 0
        if count > self.last_progress[0]:
            self.last_progress = count, time.monotonic()
        elif self.sent and time.monotonic() - self.last_progress[1] > _STALL_SECONDS:
            raise SystemExit(f"held_open: nothing was handled for {_STALL_SECONDS} s")
        return count


@dataclass(frozen=True)
class Rates:
    """Messages handled per second before the transaction was open, while it was, and in the last quarter of that."""

    free: float
    held: float
    last_quarter: float
    # Table -> dead rows per 100 handled messages, while the transaction was open.
    dead_rows: Mapping[str, float]


# Sessions report what they have changed up to a second late, while they work.
_CHANGED = """
SELECT relname, n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE schemaname = 'outbox' AND n_tup_upd + n_tup_del > 0
"""


def main() -> None:
    print(f"\nheld_open: {SECONDS:g} s without and {SECONDS:g} s with an open transaction, {REPEATS} rounds")
    with server() as url:
        found = [measure(embedded.create_database(url, f"held_{run}")) for run in range(REPEATS)]
    free = Spread.of([rates.free for rates in found])
    table(
        "delayed and retried messages beside an open transaction (median, low to high)",
        ["transaction", "messages/s", "ratio to none"],
        [
            ["none", f"{free}", f"{Spread.of([1.0 for _ in found]):.2f}"],
            [
                f"open for {SECONDS:g} s",
                f"{Spread.of([rates.held for rates in found])}",
                f"{Spread.of([rates.held / rates.free for rates in found]):.2f}",
            ],
            [
                "its last quarter",
                f"{Spread.of([rates.last_quarter for rates in found])}",
                f"{Spread.of([rates.last_quarter / rates.free for rates in found]):.2f}",
            ],
        ],
    )
    names = sorted({name for rates in found for name in rates.dead_rows})
    by_table = {name: [rates.dead_rows.get(name, 0.0) for rates in found] for name in names}
    every = [sum(rates.dead_rows.values()) for rates in found]
    table(
        "dead rows per 100 handled messages, while the transaction is open",
        ["table", "dead rows"],
        [
            [name, f"{Spread.of(values):.2f}"]
            for name, values in [*by_table.items(), ("all", every)]
            if max(values) >= 0.01
        ],
    )


def measure(url: str) -> Rates:
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection)
    with TemporaryDirectory(prefix="outbox-bench-") as folder, contextlib.ExitStack() as stack:
        calls = Path(folder) / "handled"
        os.environ["OUTBOX_BENCH_HANDLED"] = str(calls)
        broker = stack.enter_context(contextlib.closing(PostgresBroker(BrokerDatabase(conninfo=url))))
        broker.declare([Topic(name=TOPIC, types=frozenset({MessageType.NORMAL, MessageType.DELAY}))])
        stack.enter_context(process("outbox.broker", url))
        failing = ("--topics", "1", "--fail-first", str(DELAY_SECONDS))
        stack.enter_context(process("benchmarks.growth_consumer", url, *failing))
        producer = Producer(broker, calls)
        producer.warm_up()
        free = producer.run(SECONDS)
        holder = stack.enter_context(psycopg.connect(url))
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT pg_current_xact_id()")
        began, before = time.time_ns(), _changed(url)
        _, ended = producer.run(SECONDS)
        after, counted = _changed(url), time.time_ns()
        times = [at for _, at in record.entries(calls)]
        holder.rollback()
    handled = sum(began <= at < counted for at in times)
    dead = {name: 100 * (count - before.get(name, 0)) / handled for name, count in after.items()}
    quarter = _rate(times, ended - (ended - began) // 4, ended)
    return Rates(_rate(times, *free), _rate(times, began, ended), quarter, dead)


def _changed(url: str) -> dict[str, int]:
    """How many rows of each table were updated or deleted until now."""
    with psycopg.connect(url, autocommit=True) as connection:
        return dict(connection.execute(_CHANGED).fetchall())


def _rate(times: list[int], began: int, ended: int) -> float:
    return sum(began <= at < ended for at in times) / ((ended - began) / 1e9)


if __name__ == "__main__":
    main()
