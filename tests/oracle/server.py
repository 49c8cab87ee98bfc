"""A private PostgreSQL of the storm's own, and a relay in front of it whose connections can be cut."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.broker import embedded

SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "64MB",
    # A COMMIT that does not wait for the disk is lost by a crash, as on a machine with slow disks.
    "wal_writer_delay": "10s",
}


class Relay:
    """Forwards TCP connections to the server's socket, and cuts them when it is told to."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port = int(self._listener.getsockname()[1])
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, share: float, chance: random.Random) -> int:
        """Cut this share of the connections, whatever is on its way in them; return how many."""
        with self._lock:
            some = [pair for pair in self._pairs if chance.random() < share]
        for pair in some:
            _close(pair)
        return len(some)

    def close(self) -> None:
        """Stop."""
        self._listener.close()
        self.cut(1.1, random.Random(0))

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(str(self._target))
            except OSError:
                near.close()
                far.close()
                continue
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._copy, args=(source, sink, pair), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        _close(pair)
        with self._lock:
            self._pairs.discard(pair)


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


class Server:
    """The server, as faults see it."""

    settings: Mapping[str, str] = SETTINGS

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.direct = embedded.server_url(folder, settings=self.settings)
        info = conninfo_to_dict(self.direct)
        self._relay = Relay(Path(str(info["host"])) / f".s.PGSQL.{info.get('port') or 5432}")
        # What the project connects to. The faults and the checker have a way of their own.
        self.url = make_conninfo(self.direct, host="127.0.0.1", port=self._relay.port)

    def create(self, names: list[str]) -> None:
        """Create databases."""
        for name in names:
            embedded.create_database(self.direct, name)

    def database(self, name: str) -> str:
        """The direct way to a database."""
        return make_conninfo(self.direct, dbname=name)

    def crash(self) -> None:
        """Kill the server as a power switch would its processes."""
        postmaster = self._postmaster()
        subprocess.run(["kill", f"-{int(signal.SIGQUIT)}", str(postmaster)], check=False)
        while Path(f"/proc/{postmaster}").exists():
            time.sleep(0.05)

    def start(self) -> None:
        """Start it again after a crash."""
        embedded.server_url(self.folder, settings=self.settings)

    def dump(self, names: list[str], folder: Path) -> None:
        """Dump databases, when the sessions of the project have come to rest."""
        with self.connection() as connection:
            while connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND state = 'active' "
                "AND coalesce(wait_event_type, '') NOT IN ('Lock', 'Client') AND pid <> pg_backend_pid()"
            ).fetchone():
                time.sleep(0.05)
        for name in names:
            # A process that stands still may hold an exclusive lock.
            wait = "--lock-wait-timeout=5s"
            self._program(
                "pg_dump", wait, "--format=custom", f"--file={folder / name}", f"--dbname={self.database(name)}"
            )

    def restore(self, names: list[str], folder: Path) -> None:
        """Replace databases with their dumps."""
        with self.connection() as connection:
            for name in names:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
        for name in names:
            self._program("pg_restore", "--create", "--exit-on-error", f"--dbname={self.direct}", str(folder / name))

    def _postmaster(self) -> int:
        return int((self.folder / "postmaster.pid").read_text(encoding="utf-8").split()[0])

    def _program(self, name: str, *arguments: str) -> None:
        """Run a program of the server's own version."""
        subprocess.run([Path(f"/proc/{self._postmaster()}/exe").resolve().parent / name, *arguments], check=True)

    def cut(self, chance: random.Random) -> int:
        """Cut connections of the project."""
        return self._relay.cut(0.3, chance)

    def terminate(self, chance: random.Random) -> int:
        """End sessions of the project."""
        with self.connection() as connection:
            sessions = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchall()
            some = [pid for (pid,) in sessions if chance.random() < 0.3]
            for pid in some:
                connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        return len(some)

    @contextlib.contextmanager
    def full(self) -> Iterator[int]:
        """Take all sessions that an ordinary role may still open."""
        held: list[psycopg.Connection] = []
        try:
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    held.append(psycopg.connect(self.direct, autocommit=True))
                    if len(held) > 200:
                        break
            yield len(held)
        finally:
            for connection in held:
                connection.close()

    @contextlib.contextmanager
    def snapshot(self, databases: list[str]) -> Iterator[None]:
        """Hold a snapshot in each database."""
        with contextlib.ExitStack() as stack:
            for name in databases:
                connection = stack.enter_context(contextlib.closing(psycopg.connect(self.database(name))))
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                connection.execute("SELECT count(*) FROM pg_class")
            yield

    @contextlib.contextmanager
    def connection(self, name: str = "postgres") -> Iterator[psycopg.Connection]:
        """A session of the oracle's own, which waits until the server accepts it."""
        while True:
            try:
                connection = psycopg.connect(self.database(name), autocommit=True)
                break
            except psycopg.OperationalError:
                time.sleep(0.2)
        with contextlib.closing(connection):
            yield connection

    def stop(self) -> None:
        """End it."""
        self._relay.close()
        embedded.stop(self.folder)
