"""Whether a flood of messages delays the messages of another subscription, or of another tenant, of one process.

A consumer process has two subscriptions: `flood` with 60,000 waiting messages, and `calm`, to which the script
publishes 20 messages per second. The table shows the time from a publish call of `calm` to its handler: alone, and
beside handlers of the flood that wait, write a row, or compute. In the ways with tenants, both have one topic and one
subscription, with and without FairShare: then the table also shows when the process, after its first call, handles a
message of `calm` that waited behind the flood. A measurement is refused if the flood has ended before it.

OUTBOX_BENCH_MESSAGES: the size of the flood. OUTBOX_BENCH_SECONDS: the seconds of each measurement.
`python -m benchmarks.fairness tenants` measures these ways only. A run ends within five minutes.
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
from outbox.contrib.fair_share import FairShare
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
    "two tenants": {"handler": "write", "tenants": True, "fair": False},
    "two tenants with FairShare": {"handler": "write", "tenants": True, "fair": True},
}


def main() -> None:
    tenants_only = len(sys.argv) > 1
    rows = []
    with server() as url:
        for number, (way, options) in enumerate(WAYS.items()):
            if tenants_only and not options.get("tenants"):
                continue
            found = measure(embedded.create_database(url, f"fairness_{number}"), options)
            waits = found["waits"]
            shares = [f"{percentile(waits, share) * 1e3:,.1f}" for share in (0.5, 0.95, 0.99)]
            first = "" if found["first"] is None else f"{found['first']:,.1f}"
            rows.append([way, *shares, f"{max(waits) * 1e3:,.1f}", first, f"{found['flood_per_second']:,.0f}"])
    header = [f"{PER_SECOND} messages per second", "p50 ms", "p95 ms", "p99 ms", "longest ms", "first s"]
    table(
        f"publish to handler, {SECONDS:g} s each, a flood of {MESSAGES:,} messages",
        [*header, "flood, messages/s"],
        rows,
    )


def measure(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """`waits`: the waiting times of `calm` (seconds). `first`: when its first message was handled (seconds after the
    first call), if it waited behind the flood. `flood_per_second`: how many messages of the flood were handled."""
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection, "outbox")
        connection.execute("CREATE TABLE effect (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n integer)")
    broker = PostgresBroker(BrokerDatabase(conninfo=url))
    broker.declare([Topic(name=name, types=frozenset({MessageType.NORMAL})) for name in ("flood", "calm")])
    topic = "flood" if options.get("tenants") else "calm"
    stop = threading.Event()
    leading = threading.Thread(target=run_broker, args=(BrokerDatabase(conninfo=url), stop))
    leading.start()
    if options:
        for start in range(0, MESSAGES, 1000):
            broker.send([_message("flood", "flood", n) for n in range(start, start + 1000)])
    if options.get("tenants"):
        broker.send([_message(topic, "calm", -1)])
        with psycopg.connect(url, autocommit=True) as connection:
            while connection.execute("SELECT count(*) FROM outbox.consume_queue").fetchone() != (MESSAGES + 1,):
                time.sleep(0.1)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fairness", json.dumps({"url": url, **options})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    began, count = time.time(), int(SECONDS * PER_SECOND)
    for number in range(count):
        time.sleep(max(0.0, began + number / PER_SECOND - time.time()))
        broker.send([_message(topic, "calm", number)])
    with psycopg.connect(url, autocommit=True) as connection:
        run = Executor(connection, "outbox")
        left = lag(run, "flood") - count * (topic == "flood") if options else None
    # Without the messages that have waited longest, the figures would be too good.
    while int(_answer(child, "count")) < count:
        time.sleep(0.05)
    text, _ = child.communicate("stop\n")
    stop.set()
    leading.join()
    broker.close()
    if left is not None and left <= 0:
        raise SystemExit("The flood has ended before the measurement: give a larger OUTBOX_BENCH_MESSAGES.")
    found: dict[str, Any] = json.loads(text)
    return found


def _message(topic: str, tenant: str, number: int) -> Message:
    return Message(topic=topic, key=str(number % 500), headers={"tenant": tenant}, body=b"%d" % number)


def _answer(child: subprocess.Popen[str], line: str) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return child.stdout.readline()


def lag(run: Executor, group: str) -> int:
    """The number of messages that the group has not handled."""
    return sum(queue.lag for queue in list_queues(run, group))


def consume(options: dict[str, Any]) -> None:
    """The consumer process: print a line when it runs; print the figures after the line `stop` of the standard input,
    and the number of handled messages of `calm` after each other line."""
    waits: list[float] = []
    first: list[float] = []
    flooded: list[float] = []
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
        flooded.append(time.time())

    def calm(delivery: Delivery) -> None:
        if delivery.message.body == b"-1":
            first.append(time.time())
        else:
            waits.append(time.time() - delivery.message.born_at.timestamp())

    def either(delivery: Delivery) -> None:
        (calm if delivery.headers["tenant"] == "calm" else flood)(delivery)

    subscriptions: list[tuple[Subscription, AnyHandler]] = []
    if not options.get("tenants"):
        subscriptions.append((Subscription(topic="calm", group="calm"), calm))
    if "handler" in options:
        subscription = Subscription(
            topic="flood",
            group="flood",
            threads=options.get("threads", THREADS),
            mode=Mode(options.get("mode", "concurrent")),
            options=[FairShare(header="tenant")] if options.get("fair") else [],
        )
        subscriptions.append((subscription, either if options.get("tenants") else flood))
    stop = threading.Event()
    runtime = ConsumerRuntime(BrokerDatabase(conninfo=options["url"]), subscriptions)
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    while ("handler" in options and not flooded) or (options.get("fair") and not first):
        time.sleep(0.01)
    time.sleep(1.0)
    before, began = len(flooded), time.monotonic()
    print("ready", flush=True)
    per_second = None
    while sys.stdin.readline() != "stop\n":
        # The first question comes when all messages of `calm` are published.
        per_second = per_second or (len(flooded) - before) / (time.monotonic() - began)
        print(len(waits), flush=True)
    stop.set()
    thread.join()
    found = {"waits": waits, "first": first[0] - flooded[0] if first else None, "flood_per_second": per_second or 0.0}
    print(json.dumps(found), flush=True)


def compute(seconds: float) -> None:
    """Hold the interpreter lock, as pure Python does, until this thread has used the CPU for this time."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        sum(range(100))


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["tenants"]):
        main()
    else:
        consume(json.loads(sys.argv[1]))
