"""Latency from the local commit to the start of the handler, at a steady 300 transactions a second."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bulk import HANDLED, process, wait_for
from benchmarks.harness import REPEATS, Spread, child_arguments, percentile, server, table
from outbox.broker import embedded

RATE_PER_SECOND = 300
SECONDS = 10
KINDS = ("atomic", "two_phase")


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\nlatency: commit to handler, {RATE_PER_SECOND}/s for {SECONDS} s, {REPEATS} runs")
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with server() as url, TemporaryDirectory() as folder:
        for run in range(REPEATS):
            for kind in KINDS:
                found[kind].append(measure(url, f"latency_{run}_{kind}", kind, Path(folder)))
    table(
        "latency in milliseconds (median of runs, low to high)",
        ["path", "p50", "p95", "p99"],
        [
            [
                kind,
                *(f"{Spread.of([percentile(run, share) for run in found[kind]]):.2f}" for share in (0.5, 0.95, 0.99)),
            ]
            for kind in KINDS
        ],
    )


def measure(url: str, name: str, kind: str, folder: Path) -> list[float]:
    """Milliseconds of every message of one run."""
    application = embedded.create_database(url, name)
    broker = embedded.create_database(url, f"{name}_broker") if kind == "two_phase" else application
    command = [sys.executable, "-m", "benchmarks.latency", "--child", kind, application, broker]
    arrivals = folder / f"{name}.json"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        with (
            process("outbox.broker", broker),
            process(
                "benchmarks.latency_consumer", broker, "--topic", "order.paid", "--into", str(arrivals)
            ) as consumer,
        ):
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "ready\n"
            running.stdin.write("go\n")
            running.stdin.flush()
            committed: dict[str, int] = json.loads(running.stdout.readline())
            wait_for(broker, HANDLED, RATE_PER_SECOND * SECONDS)
        running.stdin.close()
    handled: dict[str, int] = json.loads(arrivals.read_text())
    # The first second warms up connections and plans.
    begin = min(committed.values()) + 1_000_000_000
    return [(handled[key] - at) / 1e6 for key, at in committed.items() if at > begin]


def child(kind: str, application: str, broker: str) -> None:
    from benchmarks.django_setup import TOPIC, configure

    configure(application, broker)
    from django.db import transaction

    from benchmarks.shop.models import Order
    from outbox.contrib.django import publish

    print("ready", flush=True)
    sys.stdin.readline()
    committed: dict[str, int] = {}
    started = time.perf_counter()
    for number in range(RATE_PER_SECOND * SECONDS):
        pause = started + number / RATE_PER_SECOND - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        with transaction.atomic():
            order = Order.objects.create(customer=f"customer-{number}", total="129.90", status="paid")
            receipt = publish(TOPIC, {"order_id": order.pk, "total": "129.90"}, key=order.pk)
        committed[str(receipt.message_id)] = time.time_ns()
    print(json.dumps(committed), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
