"""Web path: four threads of one process, each transaction writes a row by the ORM and publishes one message.

A broker and a consumer process run beside them, and have handled earlier messages when the clock starts. First one
thread runs stretches of blocks without and with publish in turn, each begun when all before it was handled; then all
threads run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bulk import HANDLED, process, wait_for
from benchmarks.django_setup import TOPIC, configure
from benchmarks.harness import REPEATS, Spread, Usage, child_arguments, measured, server, table
from outbox.broker import embedded

TRANSACTIONS = 6_000
THREADS = 4
KINDS = ("plain", "atomic", "two_phase")
WARM_UP = 100
PAIRS, STRETCH = 20, 25


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\nweb: {TRANSACTIONS:,} transactions by {THREADS} threads of one process, {REPEATS} runs")
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    usages: dict[str, list[Usage]] = {kind: [] for kind in KINDS}
    with server() as url:
        for run in range(REPEATS):
            for kind in KINDS:
                result, usage = measure(url, f"web_{run}_{kind}", kind)
                results[kind].append(result)
                usages[kind].append(usage)
    tables(results, usages)


def tables(results: dict[str, list[dict[str, float]]], usages: dict[str, list[Usage]]) -> None:
    plain = [result["rate"] for result in results["plain"]]

    def spread(kind: str, value: str) -> Spread:
        return Spread.of([result[value] for result in results[kind]])

    table(
        "web path (median, low to high)",
        ["block", "transactions/s", "ratio", "commits/message", "WAL bytes/message"],
        [
            [
                kind,
                f"{spread(kind, 'rate')}",
                f"{Spread.of([result['rate'] / rate for result, rate in zip(results[kind], plain, strict=True)]):.2f}",
                f"{Spread.of([usage.commits / TRANSACTIONS for usage in usages[kind]]):.2f}",
                f"{Spread.of([usage.wal_bytes / TRANSACTIONS for usage in usages[kind]])}",
            ]
            for kind in KINDS
        ],
    )
    # Plain against plain shows how much of a difference is none.
    table(
        "one thread, against plain blocks in turn (median, low to high); CPU: of the process and its session",
        ["block", "us/block", "ratio", "CPU us/block", "ratio"],
        [
            [
                kind,
                f"{spread(kind, 'seconds'):,.0f}",
                f"{spread(kind, 'seconds_ratio'):.2f}",
                f"{spread(kind, 'cpu'):,.0f}",
                f"{spread(kind, 'cpu_ratio'):.2f}",
            ]
            for kind in KINDS
        ],
    )


def measure(url: str, name: str, kind: str) -> tuple[dict[str, float], Usage]:
    """Transactions per second of all threads, costs of one block alone, and what the databases did meanwhile."""
    application = embedded.create_database(url, name)
    broker = embedded.create_database(url, f"{name}_broker") if kind == "two_phase" else application
    command = [sys.executable, "-m", "benchmarks.web", "--child", kind, application, broker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        with (
            process("outbox.broker", broker),
            process("benchmarks.bulk_consumer", broker, "--topic", TOPIC, "--batch", "1"),
        ):
            # Importing alone takes each of them longer than the stretches of one thread.
            wait_for(broker, HANDLED, WARM_UP)
            running.stdin.write("alone\n")
            running.stdin.flush()
            result = json.loads(running.stdout.readline())
            # Both databases are on one server, whose transaction ids and WAL are counted.
            with measured(application) as usage:
                running.stdin.write("all\n")
                running.stdin.flush()
                result["rate"] = float(running.stdout.readline())
                if kind != "plain":
                    wait_for(broker, HANDLED, WARM_UP + PAIRS * STRETCH + TRANSACTIONS)
        running.stdin.close()
    return result, usage()


def child(kind: str, application: str, broker: str) -> None:
    configure(application, broker)
    from django.db import connections, transaction

    from benchmarks.shop.models import Order
    from outbox.contrib.django import publish

    def block(number: int, *, publishes: bool) -> None:
        with transaction.atomic():
            order = Order.objects.create(customer=f"customer-{number}", total="129.90", status="paid")
            if publishes:
                publish(TOPIC, {"order_id": order.pk, "customer": order.customer, "total": "129.90"}, key=order.pk)

    def worker(count: int, *, publishes: bool) -> None:
        for number in range(count):
            block(number, publishes=publishes)

    def thread(count: int) -> None:
        worker(count, publishes=kind != "plain")
        connections.close_all()

    worker(WARM_UP, publishes=True)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(alone(kind, broker, connections["default"].connection, worker)), flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=thread, args=(TRANSACTIONS // THREADS,)) for _ in range(THREADS)]
    started = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    print(TRANSACTIONS / (time.perf_counter() - started), flush=True)
    sys.stdin.read()


def alone(kind: str, broker: str, session: Any, worker: Callable[..., None]) -> dict[str, float]:
    """Medians of what one block takes on one thread, in microseconds, and of its ratio to the plain ones in turn."""
    pairs = []
    for pair in range(PAIRS):
        plain = cost(session, lambda: worker(STRETCH, publishes=False))
        pairs.append((plain, cost(session, lambda: worker(STRETCH, publishes=kind != "plain"))))
        if kind != "plain":
            wait_for(broker, HANDLED, WARM_UP + (pair + 1) * STRETCH)
    found = {}
    for number, name in enumerate(("seconds", "cpu")):
        found[name] = statistics.median(pair[1][number] for pair in pairs) / STRETCH * 1e6
        found[f"{name}_ratio"] = statistics.median(pair[1][number] / pair[0][number] for pair in pairs)
    return found


def cost(session: Any, work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process and its session."""
    cpu, started = _cpu(session), time.perf_counter()
    work()
    return time.perf_counter() - started, _cpu(session) - cpu


def _cpu(session: Any) -> float:
    on_cpu_ns = Path(f"/proc/{session.info.backend_pid}/schedstat").read_text().split()[0]
    return time.process_time() + int(on_cpu_ns) / 1e9


if __name__ == "__main__":
    main()
