"""The cost of limits that do not bind, at 2,000 messages per second: CPU per message of consumer and PostgreSQL.

In each round, one consumer process after the other consumes without limits and with limits far above its load. CPU is
measured after the first second, so it contains no start. The CPU of PostgreSQL is that of the process's own sessions,
which needs /proc. OUTBOX_BENCH_LIMITS_SECONDS is the time of each measurement. A run of five rounds ends within three
minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import psycopg

from benchmarks.harness import REPEATS, Spread, server, table
from outbox.broker.consumer.runtime import ConsumerRuntime, tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.leading import Sequencer
from outbox.broker.operations.progress import list_queues
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.contrib.limits import Limits
from outbox.message import Delivery, Message
from outbox.subscription import Subscription
from outbox.topic import Topic

SECONDS = float(os.environ.get("OUTBOX_BENCH_LIMITS_SECONDS", "2.5"))
_WARM_SECONDS = 1.0
_RATE = 2_000
_BATCH = 40
_KEYS = 1_000
_ALL = Limits(running=1_000, per_key=100, rate="100000/s", burst=1_000)
# The limits, and whether each message has a key of its own.
_WAYS: dict[str, tuple[list[Limits], bool]] = {
    "none": ([], False),
    "running": ([Limits(running=1_000)], False),
    "rate": ([Limits(rate="100000/s", burst=1_000)], False),
    "per_key, 1,000 keys": ([Limits(per_key=100)], False),
    "all three, 1,000 keys": ([_ALL], False),
    "per_key, each message with a new key": ([Limits(per_key=100)], True),
}


def _topic(name: str) -> str:
    """Each way has a topic and a group of its own, so that no process handles the messages of another one."""
    return f"bench-{list(_WAYS).index(name)}"


def handle(delivery: Delivery) -> None:
    """Do nothing, so that the cost of limits is as visible as it can be."""


def consume(url: str, name: str) -> None:
    """The consumer process: answer each line of the standard input with the CPU time of this process, until the end."""
    stop = threading.Event()
    subscription = Subscription(group=_topic(name), topic=_topic(name), options=_WAYS[name][0])
    runtime = ConsumerRuntime(BrokerDatabase(conninfo=url), [(subscription, handle)])
    tune_garbage_collector()
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    stop.set()
    thread.join()


class _Consumer:
    """A consumer process and its sessions."""

    def __init__(self, url: str, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.limits", "--database", url, "--consume", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def cpu(self, connection: psycopg.Connection) -> tuple[float, float]:
        """The CPU time (seconds) of the process and of its sessions until now."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        own = float(self._process.stdout.readline())
        sessions = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'outbox-co%'"
        ).fetchall()
        return own, sum(_cpu_of(pid) for (pid,) in sessions)

    def stop(self) -> None:
        self._process.communicate()


def _cpu_of(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, name: str, start: int) -> tuple[float, float]:
    """The CPU per message in µs: of the consumer process, and of its sessions. `start`: the number of the first key."""
    database = BrokerDatabase(conninfo=url)
    broker = PostgresBroker(database)
    consumer = _Consumer(url, name)
    sequencer, topic, has_new_keys = Sequencer(database, uuid4()), _topic(name), _WAYS[name][1]

    with psycopg.connect(url, autocommit=True) as connection, database.connect() as ticking:
        run = Executor(ticking, "outbox")
        live = (
            "SELECT 1 FROM outbox.consumer JOIN outbox.consumer_group USING (group_id) WHERE name = %s"
            " AND expires_at > clock_timestamp()"
        )
        while connection.execute(live, [topic]).fetchone() is None:
            time.sleep(0.02)

        def publish(count: int, first: int) -> None:
            began = time.monotonic()
            for done in range(0, count, _BATCH):
                numbers = range(first + done, first + done + _BATCH)
                keys = [f"k{number if has_new_keys else number % _KEYS}" for number in numbers]
                broker.send([Message(topic=topic, key=key, body=b"{}") for key in keys])
                while sequencer.run_once(ticking).appended:
                    notify(run, Channel.QUEUED)
                time.sleep(max(0.0, began + (done + _BATCH) / _RATE - time.monotonic()))
            while sum(queue.lag for queue in list_queues(run, topic)):
                time.sleep(0.01)

        warm, count = int(_RATE * _WARM_SECONDS), int(_RATE * SECONDS)
        publish(warm, start)
        before = consumer.cpu(connection)
        publish(count, start + warm)
        after = consumer.cpu(connection)
    consumer.stop()
    broker.close()
    return 1e6 * (after[0] - before[0]) / count, 1e6 * (after[1] - before[1]) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database")
    parser.add_argument("--consume")
    options = parser.parse_args()
    if options.consume:
        consume(options.database, options.consume)
        return
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _WAYS}
    with server() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            install(connection)
        broker = PostgresBroker(BrokerDatabase(conninfo=url))
        broker.declare([Topic(name=_topic(name), queue_count=4) for name in _WAYS])
        broker.close()
        for number in range(REPEATS):
            # Every other round is in the opposite order, so that a slower machine at its end favours no way.
            for name in list(found)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(measure(url, name, number * 1_000_000))
    base = sum(Spread.of(values).median for values in zip(*found["none"], strict=True))
    rows = []
    for name, values in found.items():
        consumer, sessions = (Spread.of(column) for column in zip(*values, strict=True))
        both = consumer.median + sessions.median
        rows.append([name, f"{consumer}", f"{sessions}", f"{both:,.0f}", f"{100 * (both / base - 1):+.0f} %"])
    table(
        f"CPU per message in µs, {_RATE:,} messages/s",
        ["limits", "consumer", "sessions", "both", "against none"],
        rows,
    )


if __name__ == "__main__":
    main()
