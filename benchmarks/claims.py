"""What a claim costs beside the transaction of the inbox: messages per second, and CPU per message.

One consumer process handles the same messages with a handler in the inbox's transaction, with a claim, and with a claim
and one step, in turn. Each handler writes one row by the ORM. OUTBOX_BENCH_CLAIMS is the number of messages of a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psycopg

from benchmarks.bulk import BODY, QUEUED, process, wait_for
from benchmarks.harness import REPEATS, Spread, Usage, child_arguments, measured, server, table
from benchmarks.processes import postmaster, tree
from outbox.broker import embedded
from outbox.broker.consumer.runtime import tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.message import Delivery, Message

COUNT = int(os.environ.get("OUTBOX_BENCH_CLAIMS", "1000"))
KINDS = ("inbox", "claim", "claim and step")
EFFECTS = "SELECT count(*) FROM shop_order"
_SENT_AT_ONCE = 500


@dataclass(frozen=True)
class Handled:
    """What one run measured.

    `cpu_micros`: CPU of the consumer process and of the server, per message. `usage`: of both databases together.
    """

    rate: float
    cpu_micros: float
    usage: Usage


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\nclaims: {COUNT:,} messages, a row per message by the ORM, one process, {REPEATS} runs")
    found: dict[str, list[Handled]] = {kind: [] for kind in KINDS}
    with server() as url:
        for run in range(REPEATS):
            for number, kind in enumerate(KINDS):
                found[kind].append(handle(url, f"claims_{run}_{number}", kind))
    table(
        f"claims, {COUNT:,} messages (median, low to high; CPU of the consumer process and of the server)",
        [
            *("handler", "messages/s", "messages/s, of inbox", "CPU µs/message", "CPU, of inbox"),
            *("commits/message", "WAL bytes/message"),
        ],
        [row(kind, rows, found["inbox"]) for kind, rows in found.items()],
    )


def handle(url: str, name: str, kind: str) -> Handled:
    """Let a child handle the messages, in databases of its own with this name."""
    application, broker_url = embedded.create_database(url, name), embedded.create_database(url, f"{name}_broker")
    command = [sys.executable, "-m", "benchmarks.claims", "--child", kind, application, broker_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        _send(broker_url)
        with process("outbox.broker", broker_url):
            wait_for(broker_url, QUEUED, COUNT)
        with psycopg.connect(application, autocommit=True) as connection:
            first = postmaster(connection)
        # Both databases are on one server, whose transaction ids, WAL and CPU are counted.
        with measured(application) as usage:
            began, started = _cpu_seconds(first, running.pid), time.perf_counter()
            running.stdin.write("go\n")
            running.stdin.flush()
            wait_for(application, EFFECTS, COUNT)
            seconds = time.perf_counter() - started
            used = _cpu_seconds(first, running.pid) - began
        running.stdin.close()
    return Handled(COUNT / seconds, used * 1e6 / COUNT, usage())


def _send(url: str) -> None:
    broker = PostgresBroker(BrokerDatabase(conninfo=url))
    for start in range(0, COUNT, _SENT_AT_ONCE):
        broker.send([Message(topic="order.paid", body=BODY) for _ in range(min(_SENT_AT_ONCE, COUNT - start))])
    broker.close()


def _cpu_seconds(*roots: int) -> float:
    """The CPU that these processes and their children have used."""
    return sum(one.seconds + one.of_ended_children for root in roots for one in tree(root))


def row(kind: str, rows: list[Handled], inbox: list[Handled]) -> list[str]:
    """One kind of handler; the ratios are against the inbox in the same run."""
    return [
        kind,
        f"{Spread.of([one.rate for one in rows])}",
        f"{Spread.of([one.rate / base.rate for one, base in zip(rows, inbox, strict=True)]):.2f}",
        f"{Spread.of([one.cpu_micros for one in rows])}",
        f"{Spread.of([one.cpu_micros / base.cpu_micros for one, base in zip(rows, inbox, strict=True)]):.2f}",
        f"{Spread.of([one.usage.commits / COUNT for one in rows]):.2f}",
        f"{Spread.of([one.usage.wal_bytes / COUNT for one in rows])}",
    ]


# -- in the child -------------------------------------------------------------------------------------


def child(kind: str, application: str, broker: str) -> None:
    from benchmarks.django_setup import TOPIC, configure

    configure(application, broker)
    from benchmarks.shop.models import Order
    from outbox.contrib.django import ClaimedDelivery, subscriber

    def store(number: int) -> None:
        Order(customer=f"customer-{number}", total="129.90", status="paid").save()

    if kind == "inbox":

        @subscriber(TOPIC, group="bench")
        def inside(delivery: Delivery) -> None:
            store(delivery.body["order_id"])

    else:

        @subscriber(TOPIC, group="bench", effects="outside")
        def outside(delivery: ClaimedDelivery) -> None:
            if kind == "claim and step":
                delivery.step("charge", int, 1)
            with delivery.finish():
                store(delivery.body["order_id"])

    consume()


def consume() -> None:
    """In the child: say that the subscriber is registered, wait for the messages, and handle them until the end."""
    from django.db import connection

    from outbox.contrib.django.worker.workers import consumer_runtime

    connection.close()
    # As the consumer processes of a worker do.
    tune_garbage_collector()
    stop = threading.Event()
    print("ready", flush=True)
    sys.stdin.readline()

    def end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end, daemon=True).start()
    consumer_runtime().run(stop)


if __name__ == "__main__":
    main()
