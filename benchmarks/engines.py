"""One web job on each engine: four threads write a row by the ORM and publish one message, a consumer handles it.

PostgreSQL on the atomic and on the two-phase path, and RocketMQ, whose programs Maven fetches, all on this machine and
in turns. The consumer's handler does nothing and has no inbox, so that engines are compared and not databases. Beside
them, on the same server: RocketMQ's own Java client with the same messages. It sends a half message, inserts a row by
JDBC, commits, and sends the end; or half and end without a row; or plain messages.
ENGINES_TRANSACTIONS and OUTBOX_BENCH_REPEATS make it shorter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from benchmarks.bulk import process
from benchmarks.harness import Spread, child_arguments, percentile, server, table
from outbox.broker import embedded
from outbox.message import Delivery
from outbox.rocketmq.address import parse
from outbox.rocketmq.declarations import wire_name
from outbox.subscription import Subscription
from outbox.topic import Topic
from tests.rocketmq_server import PrivateRocketMQ, fetch, fetch_programs

TRANSACTIONS = int(os.environ.get("ENGINES_TRANSACTIONS", "2000"))
WARMING = 200
THREADS = 4
REPEATS = int(os.environ.get("OUTBOX_BENCH_REPEATS", "3"))
KINDS = ("atomic", "two_phase", "rocketmq")
TOPIC = Topic(name="order.paid")
WANTED = Subscription(group="bench", topic=TOPIC.name)
JAVA_TOPIC = Topic(name="java.paid")
JAVA_WANTED = Subscription(group="java", topic=JAVA_TOPIC.name)
# JDBC reaches the embedded server, which has no port, through its socket.
JAVA_CLIENT = {
    "rocketmq-client-java": "5.0.8",
    "org.postgresql:postgresql": "42.7.4",
    "com.kohlschutter.junixsocket:junixsocket-common": "2.10.1",
    "com.kohlschutter.junixsocket:junixsocket-native-common": "2.10.1",
}
PROGRAMS = Path(__file__).resolve().parent.parent / "var" / "rocketmq"


def main() -> None:
    if given := child_arguments():
        CHILDREN[given[0].partition("-")[0]](given[0].partition("-")[2], *given[1:])
        return
    print(f"\nengines: {TRANSACTIONS:,} transactions by {THREADS} threads of one process, {REPEATS} runs")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with server() as url, rocketmq() as queue:
        for run in range(REPEATS):
            for kind in KINDS:
                found[kind].append(measure(url, queue, f"engines_{run}_{kind}", kind))
            for name, one in java(queue, embedded.create_database(url, f"engines_{run}_java")):
                found.setdefault(f"Java client, {name}", []).append(one)
    columns: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("transactions/s", lambda one: float(one["rate"])),
        ("to the handler, median ms", lambda one: percentile(one["latencies"], 0.5) * 1e3),
        ("99th percentile ms", lambda one: percentile(one["latencies"], 0.99) * 1e3),
    ]
    rows = [
        [kind, *(f"{Spread.of([take(one) for one in runs])}" for _, take in columns)] for kind, runs in found.items()
    ]
    table("engines (median, low to high)", ["engine", *(name for name, _ in columns)], rows)


@contextmanager
def rocketmq() -> Iterator[PrivateRocketMQ]:
    """A server for the run."""
    programs = fetch_programs(PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="outbox-mq-", ignore_cleanup_errors=True) as folder:
        started = PrivateRocketMQ(Path(folder), programs)
        started.start()
        for topic, wanted in ((TOPIC, WANTED), (JAVA_TOPIC, JAVA_WANTED)):
            started.admin.create_topic(topic)
            started.admin.create_group(wanted, topic)
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def child(what: str, application: str, broker: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this script, once it is ready."""
    command = [sys.executable, "-m", "benchmarks.engines", "--child", what, application, broker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        try:
            yield running
        finally:
            running.terminate()


def measure(url: str, queue: PrivateRocketMQ, name: str, kind: str) -> dict[str, Any]:
    """One run of one kind: its rate, and what its consumer saw."""
    application = embedded.create_database(url, name)
    broker = {"atomic": application, "rocketmq": queue.url}.get(kind) or embedded.create_database(url, f"{name}_broker")
    with child(f"produce-{kind}", application, broker) as producer, child(f"consume-{kind}", name, broker) as consumer:
        with process("outbox.broker", application if kind == "rocketmq" else broker):
            assert producer.stdin is not None
            assert producer.stdout is not None
            assert consumer.stdout is not None
            producer.stdin.write("go\n")
            producer.stdin.flush()
            rate = json.loads(producer.stdout.readline())
            seen = json.loads(consumer.stdout.readline())
    return {"rate": rate, **seen}


def java(queue: PrivateRocketMQ, database: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """RocketMQ's own client: each way of sending, and what was measured of it."""
    jars = PROGRAMS / "client-java-jdbc"
    fetch(jars, JAVA_CLIENT)
    program = Path(__file__).with_name("java") / "OwnClient.java"
    proxy = str(parse(queue.url).proxies[0])
    given = [proxy, wire_name(JAVA_TOPIC.name), JAVA_WANTED.group, str(TRANSACTIONS), str(THREADS), jdbc(database)]
    command = ["java", "-Xmx256m", "-cp", f"{jars}/*", str(program), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    for line in done.stdout.splitlines():
        name, rate, latencies = line.split("\t")
        yield name, {"rate": float(rate), "latencies": [one / 1e3 for one in json.loads(latencies)]}


def jdbc(database: str) -> str:
    """The JDBC URL of a database that is reached through a socket."""
    where = conninfo_to_dict(database)
    socket = f"{where['host']}/.s.PGSQL.{where.get('port', 5432)}"
    factory = "org.newsclub.net.unix.AFUNIXSocketFactory$FactoryArg"
    return (
        f"jdbc:postgresql://localhost/{where['dbname']}?user={where['user']}&sslmode=disable"
        f"&socketFactory={factory}&socketFactoryArg={socket}"
    )


def produce(kind: str, application: str, broker: str) -> None:
    """The web job; prints its rate."""
    from benchmarks.django_setup import configure

    configure(application, application if kind == "rocketmq" else broker, rocketmq=broker if kind == "rocketmq" else "")
    from django.db import connections, transaction

    from benchmarks.shop.models import Order
    from outbox.contrib.django import publish
    from outbox.contrib.django.engine.broker import flush

    run = conninfo_to_dict(application)["dbname"]

    def worker(start: int, count: int) -> None:
        for number in range(start, start + count):
            with transaction.atomic():
                order = Order.objects.create(customer=f"customer-{number}", total="129.90", status="paid")
                publish(TOPIC.name, {"run": run, "at": time.time()}, key=order.pk)
        connections.close_all()

    print("ready", flush=True)
    sys.stdin.readline()
    worker(0, WARMING)
    flush(within_seconds=10)
    share = TRANSACTIONS // THREADS
    threads = [threading.Thread(target=worker, args=(WARMING + n * share, share)) for n in range(THREADS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(TRANSACTIONS / (time.perf_counter() - started)), flush=True)
    # Its ends are still being sent, and its checks answered.
    sys.stdin.read()


def consume(kind: str, run: str, broker: str) -> None:
    """Handle all messages of the run; prints when they came."""
    latencies: dict[object, float] = {}
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def handle(delivery: Delivery) -> None:
        now = time.time()
        if delivery.body["run"] == run and delivery.message_id not in latencies:
            latencies[delivery.message_id] = now - delivery.body["at"]
            if len(latencies) == WARMING + TRANSACTIONS:
                warm = list(latencies.values())[WARMING:]
                print(json.dumps({"latencies": warm}), flush=True)

    runtime: Any
    if kind == "rocketmq":
        from outbox.rocketmq.consumer import RocketMQConsumers

        runtime = RocketMQConsumers(broker, [(WANTED, handle)], topics=[TOPIC])
    else:
        from outbox.broker.consumer.runtime import ConsumerRuntime
        from outbox.broker.database.connection import BrokerDatabase

        runtime = ConsumerRuntime(BrokerDatabase(conninfo=broker), [(WANTED, handle)])
    print("ready", flush=True)
    runtime.run(stop)


CHILDREN: dict[str, Callable[[str, str, str], None]] = {"produce": produce, "consume": consume}


if __name__ == "__main__":
    main()
