"""The page's project, migrated once, copied for each test; Redis and RabbitMQ where they are installed."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox.broker import embedded
from tests.celery.project import Project, blocks, write_page
from tests.celery.transport import create_queue, transport
from tests.databases import drop_databases
from tests.servers import RabbitMQ, private_redis

_numbers = itertools.count()
# Quick enough for a test; the pass of a worker runs once at its start and then as each test needs it.
QUICK = "OUTBOX |= {'IMMUNITY_SECONDS': 0, 'CHECK_INTERVAL_SECONDS': 0.5, 'LEASE_SECONDS': 3}\n"


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


@pytest.fixture
def rabbitmq(rabbitmq_server: RabbitMQ) -> str:
    """The private RabbitMQ."""
    return rabbitmq_server.url
