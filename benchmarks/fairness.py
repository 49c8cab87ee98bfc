"""Whether a flood of one topic delays the messages of another subscription of the same consumer process.

A consumer process has two subscriptions: `flood` with 60,000 waiting messages, and `calm`, to which the script
publishes 20 messages per second. The table shows the time from a publish call of `calm` to its handler: alone, and
beside handlers of the flood that wait, write a row, or compute. A measurement is refused if the flood has ended before
it. OUTBOX_BENCH_MESSAGES: the size of the flood. OUTBOX_BENCH_SECONDS: the seconds of each measurement. A run ends
within two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks.harness import percentile, server, table
from outbox.broker import embedded
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.operations.progress import list_queues
from outbox.broker.postgres import PostgresBroker
from outbox.broker.process import run_broker
from outbox.broker.schema.install import install
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler
from outbox.subscription import Mode, Subscription
from outbox.topic import MessageType, Topic

MESSAGES = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "60000"))
SECONDS = float(os.environ.get("OUTBOX_BENCH_SECONDS", "8"))
PER_SECOND = 20
THREADS = 4
_COMPUTE_SECONDS = 0.002
_WAIT_SECONDS = 0.005

# The name of a measurement, and the options of the flood's subscription.
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "beside handlers that wait 5 ms": {"handler": "wait"},
    "beside handlers that write a row": {"handler": "write"},
    "beside handlers that compute for 2 ms": {"handler": "compute"},
    "beside 1 thread that computes for 2 ms": {"handler": "compute", "threads": 1},
    "beside 16 threads that compute for 2 ms": {"handler": "compute", "threads": 16},
    "beside handlers in order of keys that write a row": {"handler": "write", "mode": "key_ordered"},
}


def main() -> None:
    rows = []
    with server() as url:
        for number, (way, options) in enumerate(WAYS.items()):
            waits, flood = measure(embedded.create_database(url, f"fairness_{number}"), options)
            shares = [f"{percentile(waits, share) * 1e3:,.1f}" for share in (0.5, 0.95)]
            rows.append([way, *shares, f"{max(waits) * 1e3:,.1f}", str(len(waits)), f"{flood:,.0f}"])
    header = [f"{PER_SECOND} messages per second", "p50 ms", "p95 ms", "longest ms", "messages", "flood, messages/s"]
    table(f"publish to handler, {SECONDS:g} s each, a flood of {MESSAGES:,} messages", header, rows)


def measure(url: str, options: dict[str, Any]) -> tuple[list[float], float]:
    """The waiting times of `calm` (seconds), and how many messages of the flood were handled per second."""
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection, "outbox")
        connection.execute("CREATE TABLE effect (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n integer)")
    broker = PostgresBroker(BrokerDatabase(conninfo=url))
    broker.declare([Topic(name=name, types=frozenset({MessageType.NORMAL})) for name in ("flood", "calm")])
    stop = threading.Event()
    leading = threading.Thread(target=run_broker, args=(BrokerDatabase(conninfo=url), stop))
    leading.start()
    if options:
        for start in range(0, MESSAGES, 1000):
            broker.send([Message(topic="flood", key=str(n % 500), body=b"%d" % n) for n in range(start, start + 1000)])
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fairness", json.dumps({"url": url, **options})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    began = time.time()
    for number in range(int(SECONDS * PER_SECOND)):
        time.sleep(max(0.0, began + number / PER_SECOND - time.time()))
        broker.send([Message(topic="calm", body=b"%d" % number)])
    with psycopg.connect(url, autocommit=True) as connection:
        run = Executor(connection, "outbox")
        # Without the messages that have waited longest, the figures would be too good.
        while lag(run, "calm"):
            time.sleep(0.05)
        left = lag(run, "flood") if options else None
    text, _ = child.communicate("stop\n")
    stop.set()
    leading.join()
    broker.close()
    if left == 0:
        raise SystemExit("The flood has ended before the measurement: give a larger OUTBOX_BENCH_MESSAGES.")
    found = json.loads(text)
    return found["waits"], found["flood_per_second"]


def lag(run: Executor, group: str) -> int:
    """The number of messages that the group has not handled."""
    return sum(queue.lag for queue in list_queues(run, group))


def consume(options: dict[str, Any]) -> None:
    """The consumer process: print a line when it runs; print the figures after a line of the standard input."""
    waits: list[float] = []
    flooded: list[None] = []
    connections = threading.local()

    def write(_: Any) -> None:
        if not hasattr(connections, "one"):
            connections.one = psycopg.connect(options["url"], autocommit=True)
        connections.one.execute("INSERT INTO effect (n) VALUES (1)")

    ways: dict[str, Callable[[Any], None]] = {
        "wait": lambda _: time.sleep(_WAIT_SECONDS),
        "write": write,
        "compute": lambda _: compute(_COMPUTE_SECONDS),
    }

    def flood(given: Any) -> None:
        ways[options["handler"]](given)
        flooded.append(None)

    def calm(delivery: Delivery) -> None:
        waits.append(time.time() - delivery.message.born_at.timestamp())

    subscriptions: list[tuple[Subscription, AnyHandler]] = [(Subscription(topic="calm", group="calm"), calm)]
    if "handler" in options:
        subscription = Subscription(
            topic="flood",
            group="flood",
            threads=options.get("threads", THREADS),
            mode=Mode(options.get("mode", "concurrent")),
        )
        subscriptions.append((subscription, flood))
    stop = threading.Event()
    runtime = ConsumerRuntime(BrokerDatabase(conninfo=options["url"]), subscriptions)
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    while "handler" in options and not flooded:
        time.sleep(0.01)
    time.sleep(1.0)
    before, began = len(flooded), time.monotonic()
    print("ready", flush=True)
    sys.stdin.readline()
    per_second = (len(flooded) - before) / (time.monotonic() - began)
    stop.set()
    thread.join()
    print(json.dumps({"waits": waits, "flood_per_second": per_second}), flush=True)


def compute(seconds: float) -> None:
    """Hold the interpreter lock, as pure Python does, until this thread has used the CPU for this time."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        sum(range(100))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        consume(json.loads(sys.argv[1]))
    else:
        main()
