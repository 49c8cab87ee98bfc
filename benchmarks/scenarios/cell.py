"""One system in one scenario: its server, its producer and its worker, the load around the fault, and the drain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import processes
from benchmarks.peers.environments import ROOT, missing, python_of
from benchmarks.scenarios import counting, faults
from benchmarks.scenarios.contract import TAKEOVER_SECONDS
from benchmarks.scenarios.counting import Counted
from benchmarks.scenarios.faults import Scenario
from outbox.broker import embedded

SERVER_SETTINGS = {"max_connections": "60", "shared_buffers": "128MB", "track_commit_timestamp": "on"}
RECOVERY_SECONDS = 10.0
_BEFORE_SHARE = 0.2
_START_SECONDS = 60.0
_CATCH_UP_SECONDS = 20.0
_DRAIN_SECONDS = 45.0
# The pass that finds the work of a dead worker runs every few seconds.
_FOUND_SECONDS = 6.0
_QUIET_SECONDS = 1.0


@dataclass(frozen=True)
class Contestant:
    """A system by its adapter, a module of this package, and the environment that runs it."""

    name: str
    adapter: str
    environment: str = ""

    def left_out(self) -> str:
        """Why it cannot be run here; empty when it can."""
        install = f"no environment {self.environment}: python -m benchmarks.web_peers --install"
        return install if missing(self.environment) else ""


CONTESTANTS = (
    Contestant("this project", "this_project"),
    Contestant("django-reliable-outbox", "reliable", "django-reliable-outbox"),
    Contestant("procrastinate", "procrastinate_jobs", "procrastinate"),
    Contestant("pgmq", "pgmq_loop", "pgmq"),
)


@dataclass(frozen=True)
class Load:
    """The steady rate per second, the seconds of load of a scenario, and the worker's concurrency."""

    rate: float
    seconds: float
    workers: int


@dataclass(frozen=True)
class Outcome:
    """Rates in effects per second, before, during and after the fault; dead rows per 100 orders, by table."""

    counted: Counted
    before: float
    during: float
    recovered: float
    dead_rows: Counter[str]


class Supervised:
    """A process that is started again half a second after it exits, as by systemd."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._command, self._environment, self._log = command, environment, log
        self._stop = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def kill(self) -> None:
        """SIGKILL to it and to all its descendants at once, as at the end of a container."""
        for process in list(processes.tree(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self._stop.set()
        descendants = [process.pid for process in processes.tree(self._process.pid)]
        self._process.terminate()
        self._thread.join()
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, env=self._environment, cwd=self._log.parent, stdout=log, stderr=subprocess.STDOUT
            )

    def _supervise(self) -> None:
        while True:
            self._process.wait()
            if self._stop.wait(0.5):
                return
            self._process = self._start()


@dataclass
class Target:
    """What a fault may touch: the database `url` of a system, its server and its worker."""

    data: Path
    url: str
    tables: tuple[str, ...]
    rate: float
    rate_file: Path
    worker: Supervised
    admin: psycopg.Connection
    # A crash of the server loses its statistics.
    changed_before_crash: Counter[str] = field(default_factory=Counter)

    def set_rate(self, rate: float) -> None:
        self.rate_file.write_text(str(rate))

    def crash_server(self) -> None:
        self.changed_before_crash = counting.changed_rows(self.admin)
        faults.kill_server(embedded.postmaster_pid(self.data))
        embedded.start(self.data, settings=SERVER_SETTINGS)
        self.admin = psycopg.connect(self.url, autocommit=True)


@dataclass
class Server:
    """A system's own server. Its first database is the template of all scenarios."""

    contestant: Contestant
    folder: Path
    load: Load
    url: str = field(init=False)
    manifest: dict[str, Any] = field(init=False)
    version: str = ""

    def __post_init__(self) -> None:
        self.url = embedded.start(self.folder / "data", settings=SERVER_SETTINGS)
        template = embedded.create_database(self.url, "prepared")
        environment = self._environment(template) | {"SCENARIO": "migrate_only"}
        subprocess.run(self._command(), env=environment, cwd=self.folder, check=True)
        found = subprocess.run([*self._command(), "--manifest"], env=environment, stdout=subprocess.PIPE, check=True)
        self.manifest = json.loads(found.stdout)

    def _command(self) -> list[str]:
        return [str(python_of(self.contestant.environment)), "-m", f"benchmarks.scenarios.{self.contestant.adapter}"]

    def _environment(self, url: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PG"))}
        own = {"DATABASE_URL": url, "PYTHONPATH": str(ROOT), "JOB_WORK_MS": "0", "PRODUCER_RATE": "0"}
        return kept | own | {"WORKER_COUNT": "0"}

    def measure(self, scenario: Scenario, name: str) -> Outcome:
        """Run a scenario on a database of its own."""
        url = embedded.create_database(self.url, name, template="prepared")
        rate_file = self.folder / "rate"
        rate_file.write_text(str(self.load.rate))
        base = self._environment(url)
        produces = {"PRODUCER_RATE": str(self.load.rate), "PRODUCER_RATE_CONTROL_FILE": str(rate_file)}
        works = {"WORKER_COUNT": str(self.load.workers), "BENCH_INSTANCE_ID": "1"}
        worker = Supervised(self._command(), base | works, self.folder / f"{name}-worker.log")
        producer = Supervised(self._command(), base | produces, self.folder / f"{name}-producer.log")
        tables = tuple(self.manifest["event_tables"])
        admin = psycopg.connect(url, autocommit=True)
        target = Target(self.folder / "data", url, tables, self.load.rate, rate_file, worker, admin)
        try:
            self._warm_up(target.admin)
            times = [datetime.now(UTC)]
            started = time.monotonic()
            time.sleep(self.load.seconds * _BEFORE_SHARE)
            times.append(datetime.now(UTC))
            scenario.fault(target, started + self.load.seconds - RECOVERY_SECONDS)
            times.append(datetime.now(UTC))
            time.sleep(RECOVERY_SECONDS)
            times.append(datetime.now(UTC))
            producer.stop()
            self._drain(target.admin, times[2], scenario)
        finally:
            producer.stop()
            worker.stop()
        self.version = self.version or _version(self.folder / f"{name}-producer.log")
        with contextlib.closing(target.admin) as connection:
            counted = counting.count(connection, since=times[0])
            before, during, recovered = (counting.rate(connection, *times[n : n + 2]) for n in range(3))
            dead = counting.changed_rows(connection) + target.changed_before_crash
        per_100 = Counter({table: round(100 * rows / counted.orders, 1) for table, rows in dead.items()})
        return Outcome(counted, before, during, recovered, per_100)

    def _warm_up(self, admin: psycopg.Connection) -> None:
        """Until the worker has caught up with what was sent before it was ready. One that is too slow never does."""
        began = time.monotonic()
        while True:
            orders, last = counting.missing(admin)
            waited = time.monotonic() - began
            if last and (orders < max(self.load.rate / 4, 1) or waited > _CATCH_UP_SECONDS):
                return
            if waited > _START_SECONDS:
                raise SystemExit(f"{self.contestant.name} handles nothing; its logs are in {self.folder}")
            time.sleep(0.1)

    @staticmethod
    def _drain(admin: psycopg.Connection, faultless: datetime, scenario: Scenario) -> None:
        """Until every order has its effect and none can come a second time; at most for a while."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        settled = faultless.timestamp() + (TAKEOVER_SECONDS + _FOUND_SECONDS if scenario.interrupts else 0)
        while time.monotonic() < deadline:
            orders, last = counting.missing(admin)
            quiet_since = last.timestamp() + _QUIET_SECONDS if last else 0.0
            if not orders and time.time() > max(settled, quiet_since):
                return
            time.sleep(0.2)


def _version(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"system"')]
    return str(json.loads(lines[0])["version"]) if lines else "?"


@contextlib.contextmanager
def server(contestant: Contestant, load: Load, keep: Path | None) -> Iterator[Server]:
    """A server in a temporary folder; the logs of the processes are copied to `keep`."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        try:
            yield Server(contestant, folder, load)
        finally:
            embedded.stop(folder / "data")
            for log in folder.glob("*.log") if keep else ():
                assert keep is not None
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{contestant.adapter}-{log.name}").write_bytes(log.read_bytes())
