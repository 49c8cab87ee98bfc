"""One way at work: its databases, its web process and its worker, and what they used."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

from benchmarks import processes
from benchmarks.harness import Usage, measured
from benchmarks.peers import record
from benchmarks.peers.environments import ROOT, python_of
from benchmarks.peers.ways import Way
from benchmarks.peers.web import ENTRY, THREADS
from outbox.broker import embedded

WARM_UP = 200
# The application name of this process at the server.
MEASURING = "bench-measuring"
# The process that has handled the last message still marks it.
_SETTLE_SECONDS = 0.3
_DEADLINE_SECONDS = 300
ROLES = ("web", "its sessions", "broker", "consumer", "parent", "worker's sessions", "the rest")


@dataclass(frozen=True)
class Job:
    """The results of one job: `commits`, `blocks` and `handled` by the number of the message.

    Times are nanoseconds since 1970, durations of blocks nanoseconds, CPU seconds by role.
    """

    began: int
    commits: dict[int, int]
    blocks: dict[int, int]
    handled: dict[int, int]
    usage: Usage
    cpu: dict[str, float]

    @property
    def rate(self) -> float:
        """Messages per second from the first block's begin to the last handler's."""
        return len(self.handled) / ((max(self.handled.values()) - self.began) / 1e9)

    def latencies(self, after_seconds: float = 0.0) -> list[float]:
        """Milliseconds from commit to handler, without those of the first seconds."""
        begin = self.began + after_seconds * 1e9
        return [(self.handled[number] - at) / 1e6 for number, at in self.commits.items() if at >= begin]


@dataclass
class Running:
    """A way whose worker has handled the first messages."""

    way: Way
    application: str
    broker: str
    web: subprocess.Popen[str]
    worker: subprocess.Popen[bytes]
    others: tuple[int, ...]
    folder: Path
    next_number: int = 0
    published: int = 0

    @contextlib.contextmanager
    def stopped_worker(self) -> Iterator[None]:
        """Its processes do not run meanwhile; at the end, they have handled all messages."""
        pids = [process.pid for process in processes.tree(self.worker.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self._wait(self.next_number, 0)

    @contextlib.contextmanager
    def held_snapshot(self) -> Iterator[None]:
        """In each of its databases, a REPEATABLE READ transaction keeps its snapshot open meanwhile."""
        with contextlib.ExitStack() as stack:
            for url in {self.application, self.broker}:
                holder = stack.enter_context(psycopg.connect(url))
                holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                holder.execute("SELECT pg_current_xact_id()")
                stack.callback(holder.rollback)
            yield

    def job(
        self, count: int, *, threads: int = THREADS, per_second: float = 0.0, plain: bool = False, waits: bool = True
    ) -> Job:
        """Run blocks, and wait until what they published is handled, unless the worker is stopped."""
        first, self.next_number = self.next_number, self.next_number + count
        self.published += 0 if plain else count
        into = self.folder / f"blocks-{first}"
        told = {"first": first, "count": count, "threads": threads, "per_second": per_second, "plain": plain}
        with psycopg.connect(self.application, autocommit=True) as connection, measured(self.application) as usage:
            before = self._cpu(connection)
            answer = ask(self.web, {**told, "into": str(into)})
            handled = self._wait(first, count) if waits and not plain else {}
            time.sleep(_SETTLE_SECONDS)
            used = self._cpu(connection)
        blocks = list(ENTRY.iter_unpack(into.read_bytes()))
        return Job(
            began=answer["began"],
            commits={number: at for number, at, _ in blocks},
            blocks={number: duration for number, _, duration in blocks},
            handled=handled,
            usage=usage(),
            cpu={role: used[role] - before[role] for role in ROLES},
        )

    def _wait(self, first: int, count: int) -> dict[int, int]:
        path = self.folder / "handled"
        deadline = time.monotonic() + _DEADLINE_SECONDS
        wanted = range(first, first + count)
        while True:
            if path.exists() and path.stat().st_size >= record.size_of(self.published):
                found = record.read(path)
                if all(number in found for number in wanted):
                    return {number: found[number] for number in wanted}
            if self.worker.poll() is not None:
                raise SystemExit(f"{self.way.name}: the worker ended with {self.worker.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.way.name}: {count} messages were not handled in {_DEADLINE_SECONDS} s")
            time.sleep(0.01)

    def _cpu(self, connection: psycopg.Connection) -> dict[str, float]:
        """Seconds by role until now."""
        used: dict[str, float] = defaultdict(float)
        used["web"] = _seconds(self.web.pid)
        worker = list(processes.tree(self.worker.pid))
        for process in worker:
            used[_role(process, alone=len(worker) == 1)] += process.seconds + process.of_ended_children
        names = processes.sessions(connection)
        for process in processes.tree(processes.postmaster(connection)):
            used[_session_role(names.get(process.pid))] += process.seconds
            # The owners of ended sessions are unknown.
            used["the rest"] += process.of_ended_children
        used["the rest"] += sum(_seconds(pid) for pid in self.others)
        return used


def _seconds(pid: int) -> float:
    process = processes.read(pid)
    return 0.0 if process is None else process.seconds


def _role(process: processes.Process, *, alone: bool) -> str:
    """Of one of the worker's processes. A process that only supervises others is the parent."""
    if "broker" in process.arguments:
        return "broker"
    is_first = process.parent == os.getpid()
    return "parent" if is_first and not alone else "consumer"


def _session_role(name: str | None) -> str:
    if name is None or name == MEASURING:
        return "the rest"
    return "its sessions" if name == "bench-web" else "worker's sessions"


@contextlib.contextmanager
def running(url: str, way: Way, name: str) -> Iterator[Running]:
    """Start a way on databases of its own on the server `url`; its worker has handled the first messages."""
    with TemporaryDirectory(prefix="outbox-bench-") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        application, broker = databases(url, way, name, folder)
        environment = _environment(way, application, broker, folder)
        others = [_redis(stack, folder)] if way.program == "redis-server" else []
        web = stack.enter_context(_web_process(way, environment, folder))
        with (folder / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                [str(python_of(way.environment)), *way.worker],
                env=environment | {"OUTBOX_BENCH_ROLE": "worker"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        stack.callback(_ended, worker)
        _ready(way, web)
        it = Running(way, application, broker, web, worker, tuple(others), folder)
        try:
            it.job(WARM_UP)
            yield it
        except SystemExit:
            print((folder / "worker.log").read_text(errors="replace")[-3000:])
            raise


@contextlib.contextmanager
def one_publish(url: str, way: Way, name: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A web process alone, after its only block."""
    application, broker = databases(url, way, name, folder)
    environment = _environment(way, application, broker, folder)
    with _web_process(way, environment, folder) as web:
        _ready(way, web)
        job = {"first": 0, "count": 1, "threads": 1, "per_second": 0, "plain": False, "into": str(folder / "blocks")}
        ask(web, job)
        yield web


@contextlib.contextmanager
def _web_process(way: Way, environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    web = subprocess.Popen(
        [str(python_of(way.environment)), "-m", "benchmarks.peers.web"],
        env=environment | {"OUTBOX_BENCH_ROLE": "web"},
        # Python looks there first, and must not find this checkout's outbox in place of another's.
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield web
    finally:
        _ended(web)


def _ready(way: Way, web: subprocess.Popen[str]) -> None:
    assert web.stdout is not None
    if web.stdout.readline() != "ready\n":
        raise SystemExit(f"{way.name}: the web process did not start")


def ask(web: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, int]:
    """Let a web process run a job; its answer (see `benchmarks.peers.web.run`)."""
    assert web.stdin is not None
    assert web.stdout is not None
    web.stdin.write(json.dumps(job) + "\n")
    web.stdin.flush()
    answer: dict[str, int] = json.loads(web.stdout.readline())
    return answer


def databases(url: str, way: Way, name: str, folder: Path) -> tuple[str, str]:
    """The application's and the broker's, copied from templates that are made the first time."""
    kind = f"{way.peer}_{'two' if way.two_phase else 'one'}{'_before' if way.checkout else ''}"
    templates = [f"template_{kind}"] + ([f"template_{kind}_broker"] if way.two_phase else [])
    with psycopg.connect(url, autocommit=True) as connection:
        exists = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [templates[0]]).fetchone()
    if not exists:
        made = [embedded.create_database(url, template) for template in templates]
        environment = _environment(way, made[0], made[-1], folder) | {"OUTBOX_BENCH_ROLE": "web"}
        command = [str(python_of(way.environment)), "-m", "benchmarks.peers.web", "--prepare"]
        subprocess.run(command, env=environment, cwd=folder, check=True)
    copies = [
        embedded.create_database(url, f"{name}_{number}", template=template)
        for number, template in enumerate(templates)
    ]
    return copies[0], copies[-1]


def _environment(way: Way, application: str, broker: str, folder: Path) -> dict[str, str]:
    own = {
        "PYTHONPATH": os.pathsep.join([*_overlay(way, folder), str(ROOT)]),
        "OUTBOX_BENCH_PEER": way.peer,
        "OUTBOX_BENCH_APPLICATION": application,
        "OUTBOX_BENCH_BROKER": broker,
        "OUTBOX_BENCH_INBOX": "1" if way.inbox else "",
        "OUTBOX_BENCH_HANDLED": str(folder / "handled"),
        "OUTBOX_BENCH_REDIS": str(folder / "redis"),
    }
    if way.environment != "pgmq" and way.peer != "raw":
        own["DJANGO_SETTINGS_MODULE"] = "benchmarks.peers.settings"
    return {name: value for name, value in os.environ.items() if name != "PGAPPNAME"} | own


def _overlay(way: Way, folder: Path) -> list[str]:
    """A folder with only the other checkout's `outbox`: the benchmarks stay those of this one."""
    if way.checkout is None:
        return []
    overlay = folder / "overlay"
    if not overlay.exists():
        overlay.mkdir()
        (overlay / "outbox").symlink_to(way.checkout.resolve() / "outbox")
    return [str(overlay)]


def _redis(stack: contextlib.ExitStack, folder: Path) -> int:
    """A Redis that keeps nothing on disk, on a socket; its process id."""
    socket = folder / "redis"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(_ended, server)
    deadline = time.monotonic() + 30
    while not socket.exists():
        if time.monotonic() > deadline:
            raise SystemExit("redis-server did not start")
        time.sleep(0.01)
    return server.pid


def _ended(process: subprocess.Popen[Any]) -> None:
    """End it as its operator would; processes that do not end are killed."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
