"""Subscribers with inbox and one model write, in one consumer process: message by message, and a batch handler.

The pair in the same run writes the same rows without messages: one transaction each, and one per batch.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.bulk import BODY, QUEUED, process, wait_for
from benchmarks.harness import REPEATS, Spread, Usage, child_arguments, measured, server, table
from outbox.broker import embedded
from outbox.broker.consumer.runtime import tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.message import Delivery, Message

# How many messages, and how many of them a handler is given at once.
KINDS = {"single": (10_000, 1), "batch of 100": (50_000, 100)}
EFFECTS = "SELECT count(*) FROM shop_order"


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\ninbox: a row per message by the ORM, once by the inbox, one process, {REPEATS} runs")
    consumed: dict[str, list[tuple[float, Usage]]] = {kind: [] for kind in KINDS}
    plain: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with server() as url:
        for run in range(REPEATS):
            for number, kind in enumerate(KINDS):
                rate, rows, usage = measure(url, f"inbox_{run}_{number}", kind)
                consumed[kind].append((rate, usage))
                plain[kind].append(rows)
    table(
        "inbox (median, low to high)",
        ["handler", "messages/s", "the rows alone, one thread/s", "ratio", "commits/message", "WAL bytes/message"],
        [
            [
                kind,
                f"{Spread.of([rate for rate, _ in found])}",
                f"{Spread.of(plain[kind])}",
                f"{Spread.of([rate / rows for (rate, _), rows in zip(found, plain[kind], strict=True)]):.2f}",
                f"{Spread.of([usage.commits / KINDS[kind][0] for _, usage in found]):.4f}",
                f"{Spread.of([usage.wal_bytes / KINDS[kind][0] for _, usage in found])}",
            ]
            for kind, found in consumed.items()
        ],
    )


def measure(url: str, name: str, kind: str) -> tuple[float, float, Usage]:
    """Messages per second, plain rows per second, and what the databases did for the messages."""
    application, broker_url = embedded.create_database(url, name), embedded.create_database(url, f"{name}_broker")
    command = [sys.executable, "-m", "benchmarks.inbox", "--child", kind, application, broker_url]
    count, _ = KINDS[kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        rows = float(running.stdout.readline())
        broker = PostgresBroker(BrokerDatabase(conninfo=broker_url))
        for _ in range(0, count, 500):
            broker.send([Message(topic="order.paid", body=BODY) for _ in range(500)])
        broker.close()
        with process("outbox.broker", broker_url):
            wait_for(broker_url, QUEUED, count)
        # Both databases are on one server, whose transaction ids and WAL are counted.
        with measured(application) as usage:
            started = time.perf_counter()
            running.stdin.write("go\n")
            running.stdin.flush()
            wait_for(application, EFFECTS, count)
            rate = count / (time.perf_counter() - started)
        running.stdin.close()
    return rate, rows, usage()


def child(kind: str, application: str, broker: str) -> None:
    from benchmarks.django_setup import TOPIC, configure

    configure(application, broker)
    from django.db import connection, transaction

    from benchmarks.shop.models import Order
    from outbox.contrib.django import subscriber
    from outbox.contrib.django.worker.workers import consumer_runtime

    count, batch = KINDS[kind]

    def order(number: int) -> Order:
        return Order(customer=f"customer-{number}", total="129.90", status="paid")

    started = time.perf_counter()
    for start in range(0, count, batch):
        with transaction.atomic():
            if batch == 1:
                order(start).save()
            else:
                Order.objects.bulk_create([order(start + n) for n in range(batch)])
    print(count / (time.perf_counter() - started), flush=True)
    Order.objects.all().delete()

    if batch == 1:

        @subscriber(TOPIC, group="bench")
        def one(delivery: Delivery) -> None:
            order(delivery.body["order_id"]).save()

    else:

        @subscriber(TOPIC, group="bench", batch=batch)
        def many(deliveries: Sequence[Delivery]) -> None:
            Order.objects.bulk_create([order(delivery.body["order_id"]) for delivery in deliveries])

    sys.stdin.readline()
    connection.close()
    # As the consumer processes of a worker do.
    tune_garbage_collector()
    stop = threading.Event()

    def end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end, daemon=True).start()
    consumer_runtime().run(stop)


if __name__ == "__main__":
    main()
