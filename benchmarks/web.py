"""Web path: four threads of one process, each transaction writes a row by the ORM and publishes one message.

A broker and a consumer process run beside them. The pair in the same run is the same block without publish.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

from benchmarks.bulk import HANDLED, process, wait_for
from benchmarks.harness import REPEATS, Spread, Usage, child_arguments, measured, server, table
from outbox.broker import embedded

TRANSACTIONS = 6_000
THREADS = 4
KINDS = ("plain", "atomic", "two_phase")


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\nweb: {TRANSACTIONS:,} transactions by {THREADS} threads of one process, {REPEATS} runs")
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    usages: dict[str, list[Usage]] = {kind: [] for kind in KINDS}
    with server() as url:
        for run in range(REPEATS):
            for kind in KINDS:
                rate, alone, usage = measure(url, f"web_{run}_{kind}", kind)
                rates[kind].append(rate)
                costs[kind].append(alone)
                usages[kind].append(usage)
    table(
        "web path (median, low to high)",
        ["block", "transactions/s", "ratio", "one thread, us/block", "ratio", "commits/message", "WAL bytes/message"],
        [
            [
                kind,
                f"{Spread.of(rates[kind])}",
                f"{Spread.of([a / b for a, b in zip(rates[kind], rates['plain'], strict=True)]):.2f}",
                f"{Spread.of([cost * 1e6 for cost in costs[kind]])}",
                f"{Spread.of([a / b for a, b in zip(costs[kind], costs['plain'], strict=True)]):.2f}",
                f"{Spread.of([usage.commits / TRANSACTIONS for usage in usages[kind]]):.2f}",
                f"{Spread.of([usage.wal_bytes / TRANSACTIONS for usage in usages[kind]])}",
            ]
            for kind in KINDS
        ],
    )


def measure(url: str, name: str, kind: str) -> tuple[float, float, Usage]:
    """Transactions per second of all threads, seconds of one block alone, and what the databases did."""
    application = embedded.create_database(url, name)
    broker = embedded.create_database(url, f"{name}_broker") if kind == "two_phase" else application
    command = [sys.executable, "-m", "benchmarks.web", "--child", kind, application, broker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        with (
            process("outbox.broker", broker),
            process("benchmarks.bulk_consumer", broker, "--topic", "order.paid", "--batch", "1"),
            # Both databases are on one server, whose transaction ids and WAL are counted.
            measured(application) as usage,
        ):
            running.stdin.write("go\n")
            running.stdin.flush()
            result = json.loads(running.stdout.readline())
            if kind != "plain":
                wait_for(broker, HANDLED, TRANSACTIONS + 500)
        running.stdin.close()
    return result["rate"], result["alone"], usage()


def child(kind: str, application: str, broker: str) -> None:
    from benchmarks.django_setup import TOPIC, configure

    configure(application, broker)
    from django.db import connections, transaction

    from benchmarks.shop.models import Order
    from outbox.contrib.django import publish

    def block(number: int) -> None:
        with transaction.atomic():
            order = Order.objects.create(customer=f"customer-{number}", total="129.90", status="paid")
            if kind != "plain":
                publish(TOPIC, {"order_id": order.pk, "customer": order.customer, "total": "129.90"}, key=order.pk)

    def worker(start: int, count: int) -> None:
        for number in range(start, start + count):
            block(number)
        connections.close_all()

    worker(0, 100)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    worker(100, 400)
    alone = (time.perf_counter() - started) / 400
    share = TRANSACTIONS // THREADS
    threads = [threading.Thread(target=worker, args=(500 + n * share, share)) for n in range(THREADS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = TRANSACTIONS / (time.perf_counter() - started)
    print(json.dumps({"rate": rate, "alone": alone}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
