"""The page's project, migrated once, copied for each test; Redis and RabbitMQ where they are installed."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox.broker import embedded
from tests.celery.project import Project, blocks, write_page
from tests.celery.transport import create_queue, transport
from tests.conftest import drop_databases
from tests.support import eventually

_numbers = itertools.count()
# Quick enough for a test; the pass of a worker runs once at its start and then as each test needs it.
QUICK = (
    "OUTBOX |= {'IMMUNITY_SECONDS': 0, 'CHECK_RETRY_SECONDS': 1, 'CHECK_INTERVAL_SECONDS': 0.5, 'LEASE_SECONDS': 3}\n"
)


@pytest.fixture(scope="session")
def migrated(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """The folder of the project and the names of its two databases, after the page's commands."""
    folder = tmp_path_factory.mktemp("page")
    names = [f"celery_page_{os.getpid()}_{part}" for part in ("app", "outbox")]
    app, outbox = (embedded.create_database(server_url, name) for name in names)
    write_page(folder)
    made = Project(folder, app, outbox, "memory://")
    made.shell(blocks("sh")[1])
    yield folder, names[0], names[1]
    drop_databases(server_url, names)


@pytest.fixture
def shop(
    migrated: tuple[Path, str, str], new_database: Callable[..., str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Project]:
    """A project of this test's own. Parametrised by the name of a transport; by default there is only memory."""
    folder, app, outbox = migrated
    where = tmp_path / "project"
    shutil.copytree(folder, where)
    name = getattr(request, "param", "memory")
    url = request.getfixturevalue(name) if name != "memory" else "memory://"
    made = Project(where, new_database(template=app), new_database(template=outbox), url)
    made.write("shop/settings.py", QUICK)
    yield made
    made.stop()


@pytest.fixture
def sqlalchemy(new_database: Callable[..., str]) -> str:
    """Celery's transport in a database of its own."""
    url = new_database()
    create_queue(url, "celery")
    return transport(url)


@pytest.fixture
def redis(redis_socket: Path) -> str:
    """A database of a private Redis."""
    return f"redis+socket://{redis_socket}?virtual_host={next(_numbers) % 16}"


@pytest.fixture
def redis_socket(tmp_path: Path) -> Iterator[Path]:
    """A private Redis that has started."""
    with private_redis(tmp_path) as path:
        yield path


class private_redis:  # noqa: N801
    """A Redis of a test's own, on a socket in `folder`."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self.path = folder / "redis.sock"
        self._command = [program, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--dir", str(folder)]

    def __enter__(self) -> Path:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        eventually(self._answers, what="Redis")
        return self.path

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.path)) == 0


@pytest.fixture(scope="session")
def rabbitmq_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a private RabbitMQ that has started."""
    program = shutil.which("rabbitmq-server", path=f"/usr/lib/rabbitmq/bin{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("rabbitmq-server is not installed")
    folder = tmp_path_factory.mktemp("rabbitmq")
    port, distribution, names = _free_ports(3)
    environment = {
        **os.environ,
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"outbox-tests-{os.getpid()}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "ERL_EPMD_PORT": str(names),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
    }
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen([program], env=environment, stdout=output, stderr=subprocess.STDOUT)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    eventually(is_up, within_seconds=90, what=log.read_text)
    yield port
    process.terminate()
    process.wait()
    epmd = shutil.which("epmd")
    if epmd is not None:
        subprocess.run([epmd, "-port", str(names), "-kill"], stdout=subprocess.DEVNULL, check=False)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def rabbitmq(rabbitmq_port: int) -> str:
    """The private RabbitMQ."""
    return f"amqp://guest:guest@127.0.0.1:{rabbitmq_port}//"
