"""Servers of the tests' own: PostgreSQL, and where they are installed, Redis and RabbitMQ."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.broker import embedded
from outbox.broker.private_server import one_process
from tests import leftovers
from tests.support import eventually


@contextlib.contextmanager
def private_postgres(**settings: str) -> Iterator[tuple[Path, str]]:
    """A PostgreSQL of a test's own, in memory if there is room: its data directory and its URL."""
    with leftovers.server_folder() as folder:
        data = folder / "data"
        copy_cluster(data)
        try:
            yield data, embedded.start(data, settings=settings)
        finally:
            embedded.stop(data)


def copy_cluster(data: Path) -> None:
    """Make the data directory of a new server: what initdb makes once in a run, copied.

    Because initdb takes longer than most tests. All copies have the same system identifier.
    """
    made = Path(tempfile.gettempdir()) / "cluster"
    server = embedded._server(made)
    server._prepare()
    with one_process(made):
        if not (made / "PG_VERSION").exists():
            server._initialise()
    subprocess.run(["cp", "--archive", "--no-target-directory", made, data], check=True)


class private_redis:  # noqa: N801
    """A Redis of a test's own, on a socket in `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self.path = folder / "redis.sock"
        self._command = [program, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--dir", str(folder)]
        self._command += options

    def __enter__(self) -> Path:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        eventually(self._answers, what="Redis")
        return self.path

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """End it without warning; `with` starts it again."""
        self._process.kill()
        self._process.wait()
        self.path.unlink()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.path)) == 0


class RabbitMQ:
    """A RabbitMQ of the tests' own in `folder`, with which it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("rabbitmq-server", path=f"/usr/lib/rabbitmq/bin{os.pathsep}{os.environ['PATH']}")
        if program is None:
            pytest.skip("rabbitmq-server is not installed")
        self._program = program
        self._log = folder / "output"
        self.port, distribution, self._names = free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"outbox-tests-{os.getpid()}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "ERL_EPMD_PORT": str(self._names),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        }

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [self._program],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        eventually(self._is_up, within_seconds=90, what=self._log.read_text)

    def kill(self) -> None:
        """End all of its processes without warning."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End it, and the name server that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        epmd = shutil.which("epmd")
        if epmd is not None:
            subprocess.run([epmd, "-port", str(self._names), "-kill"], stdout=subprocess.DEVNULL, check=False)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


def free_ports(count: int) -> list[int]:
    """Ports that are not in use now, below those that Linux gives to clients (32768 to 60999)."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found += [port] if port not in found else []
    return found
