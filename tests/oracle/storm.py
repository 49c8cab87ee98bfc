"""One storm: a project with clients and workers, faults that strike them, and the quiet after it.

The storm makes what `checker` reads: a folder of lines, and a copy of the business tables when all is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle import lines
from tests.oracle.checker import Tables, missing_effects
from tests.oracle.server import Server

MANAGE = [sys.executable, "-W", "ignore", "-m", "tests.oracle.shop.manage"]
CELERY = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tests.oracle.shop.celery", "worker", "--outbox"]
CLIENTS = 4
WORKERS = 2
PROGRAMS = 6
# So long after the last effect, those that are still missing will not come.
QUIET_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What a storm is made of; everything else follows from its seed."""

    seed: int
    path: str = "atomic"
    celery: bool = False
    seconds: float = 45.0
    faults: bool = True


@dataclass
class Outcome:
    """What a storm left."""

    plan: Plan
    lines: list[dict[str, Any]]
    tables: Tables
    folder: Path
    settled: bool = True

    @property
    def histories(self) -> int:
        """How many of a client have come as far as a row."""
        return len({line["name"].split(".")[0] for line in self.lines if line["event"] in ("try", "book")})


class Storm:
    """Processes, and what may happen to them."""

    def __init__(self, plan: Plan, folder: Path, server: Server) -> None:
        self.plan = plan
        self.folder = folder
        self.server = server
        self.random = random.Random(plan.seed)
        self.prefix = f"o{plan.seed}"
        self.databases = [f"{self.prefix}_{name}" for name in ("shop", "second", "broker")]
        self.lines = folder / "lines"
        self.lines.mkdir(parents=True)
        self.environment = os.environ | {
            "ORACLE_SERVER": server.url,
            "ORACLE_PREFIX": self.prefix,
            "ORACLE_PATH": plan.path,
            # With a limit of 1, one call of each worker is already one too many.
            "ORACLE_RUNNING": str(1 + plan.seed // 4 % 2),
            "ORACLE_LINES": str(self.lines),
            "DJANGO_SETTINGS_MODULE": "tests.oracle.shop.settings",
            "PGCONNECT_TIMEOUT": "10",
        }
        os.environ[lines.FOLDER_VARIABLE] = str(self.lines)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.clients: list[subprocess.Popen[bytes]] = []
        self.next_history = plan.seed * 100_000
        self.over = threading.Event()
        # The storm does not ask for the status while it replaces databases.
        self.replacing = threading.Lock()
        self.dumps = folder / "dumps"
        self.dumped_at = 0.0

    # -- processes ---------------------------------------------------------------------------------------------

    def start(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """A process with a group of its own."""
        with (self.folder / f"{log}.log").open("ab") as output:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )

    def set_up(self) -> None:
        """Databases and tables, as the documents say."""
        self.server.create(self.databases)
        aliases = ["default", "second"] + (["broker"] if self.plan.path == "two-phase" else [])
        for alias in aliases:
            command = [*MANAGE, "migrate", "--run-syncdb", "--database", alias, "--verbosity", "0"]
            with (self.folder / "migrate.log").open("ab") as log:
                subprocess.run(command, env=self.environment, check=True, stdout=log, stderr=log)

    def start_worker(self) -> None:
        """Without Celery or with it."""
        command = [*CELERY, "--pool", "solo"] if self.plan.celery else [*MANAGE, "outbox_worker"]
        self.workers.append(self.start(command, f"worker{len(self.workers)}"))

    def start_client(self) -> None:
        """A process that runs some histories."""
        some = 30
        numbers = [str(self.next_history), str(some), str(PROGRAMS)]
        self.next_history += some
        command = [sys.executable, "-W", "ignore", "-m", "tests.oracle.clients", *numbers]
        self.clients.append(self.start(command, f"client{self.next_history}"))

    def keep_up(self, *, clients: bool) -> None:
        """Start again what has died, as a supervisor would."""
        self.clients = [one for one in self.clients if one.poll() is None]
        while len(self.workers) < WORKERS:
            self.start_worker()
        while clients and len(self.clients) < CLIENTS:
            self.start_client()
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                lines.write("worker_ended", code=worker.returncode)
                command = worker.args
                assert isinstance(command, list)
                self.workers[number] = self.start(command, f"worker{number}")

    def descendants(self, process: subprocess.Popen[bytes]) -> list[int]:
        """The processes of a worker, its own first."""
        found = [process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

    def stop_all(self, processes: list[subprocess.Popen[bytes]], number: int) -> None:
        """End processes, with all that they have started."""
        for one in processes:
            if number == signal.SIGKILL:
                for pid in self.descendants(one):
                    _signal(pid, number)
            elif one.poll() is None:
                one.send_signal(number)
        for one in processes:
            try:
                one.wait(40)
            except subprocess.TimeoutExpired:
                for pid in self.descendants(one):
                    _signal(pid, signal.SIGKILL)
                one.wait(10)

    # -- faults ------------------------------------------------------------------------------------------------

    def victim(self) -> int:
        """A process of a worker, or a client."""
        whose = self.random.choice(self.workers if self.random.random() < 0.7 else self.clients or self.workers)
        return self.random.choice(self.descendants(whose))

    def kill(self) -> None:
        """One process."""
        pid = self.victim()
        lines.write("fault", kind="kill", victim=pid)
        _signal(pid, signal.SIGKILL)

    def kill_worker(self) -> None:
        """All processes of one worker at once."""
        victims = self.descendants(self.random.choice(self.workers))
        lines.write("fault", kind="kill worker", victims=victims)
        for pid in victims:
            _signal(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """One process, for shorter or longer than a lease."""
        pid, seconds = self.victim(), self.random.choice([1.0, 5.0])
        lines.write("fault", kind="freeze", victim=pid)
        _signal(pid, signal.SIGSTOP)
        self.over.wait(seconds)
        lines.write("thaw", victim=pid)
        _signal(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def still(self, processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
        """These processes stand still, with all that they have started."""
        pids = [pid for one in processes for pid in self.descendants(one)]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                _signal(pid, signal.SIGCONT)

    def crash_server(self) -> None:
        """PostgreSQL, which stays away for a while, sometimes until the status was asked."""
        # In half of the crashes the workers stand still, so that none of their commits writes out those of the clients.
        is_quiet = self.random.random() < 0.5
        with self.still(self.workers if is_quiet else []):
            self.over.wait(1.0 if is_quiet else 0.0)
            lines.write("fault", kind="crash of the server")
            self.server.crash()
        self.over.wait(0.6 + self.random.random())
        if self.random.random() < 0.7:
            self.ask_status()
        self.server.start()
        lines.write("server_up")

    def end_sessions(self) -> None:
        """A third of them."""
        lines.write("fault", kind="sessions ended", count=self.server.terminate(self.random))

    def cut(self) -> None:
        """Connections, with what is on its way in them."""
        lines.write("fault", kind="connections cut", count=self.server.cut(self.random))

    def fill(self) -> None:
        """No session is left for a while."""
        with self.server.full() as count:
            lines.write("fault", kind="sessions exhausted", count=count)
            self.over.wait(3)
        lines.write("sessions_free")

    def hold_snapshot(self) -> None:
        """A snapshot elsewhere."""
        lines.write("fault", kind="snapshot held")
        with contextlib.suppress(Exception), self.server.snapshot(self.databases):
            self.over.wait(5)

    def dump(self) -> None:
        """All databases are dumped at one moment: nothing runs until it is done."""
        lines.write("fault", kind="dump")
        dumped_at = time.time()
        self.dumps.mkdir(exist_ok=True)
        with self.still(self.clients + self.workers), contextlib.suppress(subprocess.CalledProcessError):
            self.server.dump(self.databases, self.dumps)
            self.dumped_at = dumped_at
        lines.write("dumped", done=self.dumped_at == dumped_at)

    def restore(self) -> None:
        """All databases go back to the dump, or the broker's alone, as docs/operations/restore.md says."""
        is_whole = self.plan.path == "atomic" or self.random.random() < 0.5
        databases = self.databases if is_whole else self.databases[2:]
        with self.replacing:
            lines.write("fault", kind="restore" if is_whole else "restore of the broker")
            self.stop_all(self.clients + self.workers, self.random.choice([signal.SIGTERM, signal.SIGKILL]))
            self.server.restore(databases, self.dumps)
            lines.write("restored" if is_whole else "broker_restored", dumped_at=self.dumped_at)
            self.dumped_at = 0.0
            self.clients, self.workers = [], []
            self.keep_up(clients=True)

    def strike(self, *, early: bool) -> None:
        """One fault. A restore comes early, because it takes back much of what the storm has shown."""
        faults: list[Callable[[], None]] = [
            self.kill, self.kill_worker, self.freeze, self.crash_server,
            self.end_sessions, self.cut, self.fill, self.hold_snapshot, self.restore,
        ]  # fmt: skip
        if self.dumped_at:
            self.random.choices(faults, [6, 3, 4, 6, 3, 4, 1, 1, 4 if early else 0])[0]()
        else:
            self.dump()

    # -- from the beginning to the end ---------------------------------------------------------------------------

    def watch(self) -> None:
        """Ask for the status again and again."""
        while not self.over.is_set():
            with self.replacing:
                self.ask_status()
            self.over.wait(4)

    def ask_status(self) -> dict[str, Any]:
        """What the status says."""
        began = time.time()
        run = subprocess.run(
            [*MANAGE, "outbox_status", "--json"], env=self.environment, capture_output=True, text=True, timeout=120
        )
        try:
            answer = json.loads(run.stdout)
        except ValueError:
            answer = {"unreadable": run.stdout[-2000:], "errors": run.stderr[-2000:]}
        lines.write("status", began=began, code=run.returncode, answer=answer)
        return dict(answer)

    def blow(self) -> None:
        """Clients and workers under faults."""
        watcher = threading.Thread(target=self.watch, daemon=True)
        watcher.start()
        half = time.monotonic() + self.plan.seconds / 2
        until = time.monotonic() + self.plan.seconds
        # The first fault is a dump, which shall contain something.
        calm = self.plan.seconds / (4 if self.plan.faults else 1)
        strike_at = time.monotonic() + calm
        while time.monotonic() < until:
            self.keep_up(clients=True)
            if self.plan.faults and time.monotonic() > strike_at:
                self.strike(early=time.monotonic() < half)
                strike_at = time.monotonic() + 0.5 + self.random.random() * 2.5
            time.sleep(0.1)
        self.over.set()
        lines.write("calm")
        self.finish_clients()
        watcher.join(60)

    def finish_clients(self) -> None:
        """Let them end what they do."""
        for one in self.clients:
            if one.poll() is None:
                one.send_signal(signal.SIGKILL if self.random.random() < 0.5 else signal.SIGTERM)
        for one in self.clients:
            one.wait(60)

    def settle(self) -> bool:
        """Wait until each committed row has its effects; False when it takes too long."""
        until = time.monotonic() + QUIET_SECONDS
        settled_at = None
        missing = -1
        while time.monotonic() < until:
            self.keep_up(clients=False)
            found = list(lines.read(self.lines))
            before, missing = missing, missing_effects(found, self.tables())
            if missing:
                settled_at = None
                if missing != before:
                    until = time.monotonic() + QUIET_SECONDS
            elif settled_at is None:
                settled_at = time.monotonic()
            elif time.monotonic() - settled_at > 8:  # longer than two leases: a second effect would have come
                return True
            time.sleep(1)
        return False

    def tables(self) -> Tables:
        """The business tables of both databases."""
        with self.server.connection(self.databases[0]) as shop, self.server.connection(self.databases[1]) as second:
            return Tables(
                orders={name for (name,) in shop.execute("SELECT name FROM shop_order")}
                | {name for (name,) in second.execute("SELECT name FROM shop_order")},
                effects=[
                    (group, name, number)
                    for group, name, number in shop.execute('SELECT "group", name, number FROM shop_effect ORDER BY id')
                ],
                bookings={
                    name: (refused, reserved, confirmed)
                    for name, refused, reserved, confirmed in shop.execute(
                        "SELECT name, refused, reserved, confirmed FROM shop_booking"
                    )
                },
            )

    def run(self) -> Outcome:
        """The whole storm."""
        self.set_up()
        try:
            self.blow()
            settled = self.settle()
            time.sleep(2)
            self.ask_status()
            for event, more in {"audit": [], "compared": ["compare", "--json"]}.items():
                command = [*MANAGE, "outbox_audit", *more]
                run = subprocess.run(command, env=self.environment, capture_output=True, text=True)
                lines.write(event, code=run.returncode, text=run.stdout, errors=run.stderr)
            self.stop_all(self.workers, signal.SIGTERM)
            tables = self.tables()
        finally:
            self.over.set()
            self.stop_all(self.clients + self.workers, signal.SIGKILL)
        found = list(lines.read(self.lines))
        return Outcome(self.plan, found, tables, self.folder, settled=settled)

    def drop(self) -> None:
        """Remove the databases of a storm that has left nothing to look at."""
        with self.server.connection() as connection:
            for name in self.databases:
                connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        shutil.rmtree(self.folder, ignore_errors=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
