"""The cost of metrics in a process: one publish call, and one call of a handler with 1 and with 500 messages."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from benchmarks.harness import Spread, table
from outbox.contrib.opentelemetry.recorder import OpenTelemetryRecorder
from outbox.contrib.prometheus.recorder import PrometheusRecorder
from outbox.utils import measures

CALLS = 20_000
REPEATS = 5


def main() -> None:
    """Alone, and with files for several processes: prometheus_client chooses when it is imported."""
    rows = [["off", *measure()], ["Prometheus", *measure(PrometheusRecorder(CollectorRegistry()))]]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}
        child = [sys.executable, "-m", "benchmarks.metrics", "--child"]
        text = subprocess.run(child, env=environment, check=True, capture_output=True, text=True).stdout
    rows.append(["Prometheus, several processes", *text.strip().split("|")])
    rows.append(["OpenTelemetry without a provider", *measure(OpenTelemetryRecorder())])
    rows.append(["OpenTelemetry", *measure(OpenTelemetryRecorder(MeterProvider([InMemoryMetricReader()])))])
    table("microseconds per call (median, low to high)", ["metrics", "publish", "handler, 1", "handler, 500"], rows)


def measure(*recorders: measures.Recorder) -> list[str]:
    """The columns of a row."""
    measures.install(*recorders)
    one, many = [0.001], [0.001] * 500

    def publish() -> None:
        if measures.recorder is not None:
            measures.recorder.published(["orders"], "atomic", 0.001)

    def handle(waits: list[float]) -> None:
        if measures.recorder is not None:
            measures.recorder.handled("points", "orders", waits, 0.001, count=len(waits), failures=[])

    return [timed(publish), timed(lambda: handle(one)), timed(lambda: handle(many))]


def timed(call: Callable[[], None], *, calls: int = CALLS) -> str:
    """Microseconds of one call."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - started) / calls * 1e6)
    return f"{Spread.of(taken):.2f}"


if __name__ == "__main__":
    if "--child" in sys.argv:
        print("|".join(measure(PrometheusRecorder(CollectorRegistry()))))
    else:
        main()
