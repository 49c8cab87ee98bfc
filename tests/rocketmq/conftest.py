"""One RocketMQ for the whole run; topics and groups are each test's own, by their names."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox.topic import MessageType, Topic
from tests.django.conftest import (  # noqa: F401
    application,
    cleaners,
    databases,
    django_db_setup,
    no_subscribers,
    outbox_settings,
)
from tests.rocketmq_server import PrivateRocketMQ, fetch_programs

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(os.environ.get("OUTBOX_ROCKETMQ_PROGRAMS", ROOT / "var" / "rocketmq"))
# Asks about an undecided message after a second, and every second: no test waits for the real minutes. A decision
# is noted at once, not three seconds later, or it would be asked about again.
QUICK = {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 600,
    "transactionOpBatchInterval": 50,
}
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nearly everything of this folder wants the server."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "programs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.rocketmq)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def programs() -> Path:
    """The server's jars; the first run fetches them."""
    return fetch_programs(PROGRAMS)


@contextmanager
def running_server(programs: Path, **settings: object) -> Iterator[PrivateRocketMQ]:
    """A server that asks quickly, unless `settings` of its broker say otherwise."""
    with tempfile.TemporaryDirectory(prefix="outbox-mq-", ignore_cleanup_errors=True) as folder:
        server = PrivateRocketMQ(Path(folder), programs, broker={**QUICK, **settings})
        server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="session")
def rocketmq(programs: Path) -> Iterator[PrivateRocketMQ]:
    """The run's server."""
    with running_server(programs) as server:
        yield server


@pytest.fixture
def new_topic(rocketmq: PrivateRocketMQ) -> Callable[..., Topic]:
    """A function that creates a topic of this test's own, of the types given."""

    def create(*types: str, queue_count: int = 2) -> Topic:
        kinds = frozenset(map(MessageType, types)) or frozenset({MessageType.NORMAL, MessageType.TRANSACTION})
        topic = Topic(name=f"t{next(_numbers)}.{os.getpid()}", types=kinds, queue_count=queue_count)
        rocketmq.admin.create_topic(topic)
        return topic

    return create


def unique(name: str) -> str:
    """A name that no other test of this run's server has."""
    return f"{name}{next(_numbers)}-{os.getpid()}"
