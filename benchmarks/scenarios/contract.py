"""The protocol of the public benchmark: an adapter is one process that produces, works and reports JSON lines.

    DATABASE_URL=postgresql://… PRODUCER_RATE=100 WORKER_COUNT=4 python -m benchmarks.scenarios.this_project
    python -m benchmarks.scenarios.this_project --manifest          the adapter.json that the public benchmark reads

Each produced transaction writes one row of `scenario_order` and sends one message; each handler writes one row of
`scenario_effect`. With PRODUCER_RATE=0 the process only works, with WORKER_COUNT=0 it only produces.
SCENARIO=migrate_only makes the tables and ends; otherwise they are made if they are missing. SIGTERM ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

TABLES = """
CREATE TABLE scenario_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                             at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE scenario_effect (order_id bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX ON scenario_effect USING brin (at);
"""
ORDER = "INSERT INTO scenario_order DEFAULT VALUES RETURNING id"
EFFECT = "INSERT INTO scenario_effect (order_id) VALUES (%s)"
_LATENCIES = """
SELECT percentile_cont(ARRAY[0.5, 0.95, 0.99])
       WITHIN GROUP (ORDER BY extract(epoch FROM scenario_effect.at - scenario_order.at)::float8 * 1000)
FROM scenario_effect JOIN scenario_order ON scenario_order.id = order_id
WHERE scenario_effect.at > now() - interval '30 s'
"""
_COUNTS = "SELECT (SELECT count(*) FROM scenario_order), (SELECT count(*) FROM scenario_effect)"
# A worker that was killed is given up after this time, in every system.
TAKEOVER_SECONDS = 10
_RETRY_SECONDS = 0.1
_STOP_SECONDS = 4.0


@dataclass(frozen=True)
class System:
    """One system under test.

    - `package`: whose version is reported; `tables`: where it keeps messages
    - `prepare`: makes its tables in an empty database
    - `blocks`: what a producing process calls once; it returns the function of one transaction, which gets the padding
    - `worker`: the arguments of the interpreter that runs its worker
    """

    name: str
    package: str
    tables: tuple[str, ...]
    prepare: Callable[[], None]
    blocks: Callable[[], Callable[[str], None]]
    worker: tuple[str, ...]

    def manifest(self) -> dict[str, Any]:
        name = self.name.replace(" ", "-")
        own = {"system": name, "display_name": self.name, "db_name": f"{name.replace('-', '_')}_bench"}
        return {**own, "event_tables": list(self.tables), "event_indexes": [], "extensions": []}


def number(variable: str, default: float) -> float:
    return float(os.environ.get(variable) or default)


def handler_works() -> None:
    """The time that a handler takes besides its effect, JOB_WORK_MS."""
    time.sleep(number("JOB_WORK_MS", 1) / 1000)


def main(system: System) -> None:
    if "--manifest" in sys.argv:
        print(json.dumps(system.manifest(), indent=2))
        return
    prepare(system)
    if os.environ.get("SCENARIO") != "migrate_only":
        sys.exit(Adapter(system).run())


def prepare(system: System) -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        row = connection.execute("SELECT to_regclass('scenario_effect') IS NOT NULL").fetchone()
        if row == (False,):
            system.prepare()
            connection.execute(TABLES)


class Adapter:
    """A process of the benchmark: up to one producer and one worker, and the samples."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._stop = threading.Event()
        self._sent = 0
        self._rate = number("PRODUCER_RATE", 800)
        self._observes = os.environ.get("BENCH_INSTANCE_ID", "0") == "0"

    def run(self) -> int:
        """Until SIGTERM, or until the worker exits; its code."""
        if os.environ.get("PRODUCER_MODE", "fixed") != "fixed":
            raise SystemExit("this adapter produces at a fixed rate: set PRODUCER_MODE=fixed")
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda *_: self._stop.set())
        self._describe()
        works = number("WORKER_COUNT", 32) > 0
        worker = subprocess.Popen([sys.executable, *self._system.worker], stdin=subprocess.DEVNULL) if works else None
        threads = [threading.Thread(target=self._sample, daemon=True)]
        if self._rate > 0:
            threads.append(threading.Thread(target=self._produce, daemon=True))
        for thread in threads:
            thread.start()
        while not self._stop.wait(0.1):
            if worker is not None and worker.poll() is not None:
                return worker.returncode or 1
        if worker is not None:
            worker.terminate()
            try:
                worker.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        return 0

    def _produce(self) -> None:
        """Offer `rate` transactions per second by the clock; what an outage of over a second held up is not offered."""
        block = self._system.blocks()
        padding = "x" * int(number("JOB_PAYLOAD_BYTES", 256))
        credit, last = 0.0, time.monotonic()
        while not self._stop.is_set():
            rate, now = self._wanted_rate(), time.monotonic()
            credit, last = min(credit + rate * (now - last), max(rate, 1)), now
            if credit < 1:
                time.sleep(min((1 - credit) / max(rate, 1), 0.05))
                continue
            credit -= 1
            try:
                block(padding)
                self._sent += 1
            except Exception as error:
                # The outcome of its COMMIT may be unknown: the tables tell afterwards.
                print(f"producer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                time.sleep(_RETRY_SECONDS)

    def _wanted_rate(self) -> float:
        file = os.environ.get("PRODUCER_RATE_CONTROL_FILE")
        try:
            return float(Path(file).read_text()) if file else self._rate
        except (OSError, ValueError):
            return self._rate

    # -- JSON lines -------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        database = conninfo_to_dict(os.environ["DATABASE_URL"]).get("dbname")
        found = version(self._system.package)
        said = self._system.manifest() | {"kind": "descriptor", "version": found, "schema_version": found}
        _emit(said | {"db_name": database, "started_at": _now()})

    def _sample(self) -> None:
        every = number("SAMPLE_EVERY_S", 5)
        last, sent, done = time.monotonic(), 0, 0.0
        while not self._stop.wait(every - time.time() % every):
            try:
                latencies, orders, effects = _read()
            except psycopg.Error as error:
                print(f"no sample: {error}", file=sys.stderr, flush=True)
                continue
            now = time.monotonic()
            seconds, last = now - last, now
            if number("WORKER_COUNT", 32) > 0:
                for share, value in zip((50, 95, 99), latencies, strict=True):
                    self._metric(f"claim_p{share}_ms", value, 30)
                self._metric("completion_rate", (effects - done) / seconds, every)
            if self._rate > 0:
                self._metric("enqueue_rate", (self._sent - sent) / seconds, every)
            if self._observes:
                self._metric("queue_depth", max(orders - effects, 0), 0)
                self._metric("producer_target_rate", self._wanted_rate(), 0)
            sent, done = self._sent, effects

    def _metric(self, metric: str, value: float, window_s: float) -> None:
        own = {"kind": "adapter", "subject_kind": "adapter", "subject": "", "metric": metric}
        _emit({"t": _now(), "system": self._system.manifest()["system"], **own, "value": value, "window_s": window_s})


def _read() -> tuple[list[float], int, int]:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        latencies = connection.execute(_LATENCIES).fetchall()[0][0]
        orders, effects = connection.execute(_COUNTS).fetchall()[0]
    return latencies or [0.0, 0.0, 0.0], orders, effects


def _emit(record: dict[str, Any]) -> None:
    print(json.dumps(record | {"instance_id": int(os.environ.get("BENCH_INSTANCE_ID", "0"))}), flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
