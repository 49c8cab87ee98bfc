from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from outbox.topic import MessageType, Topic
from tests.contract.benches import AtomicBench, Bench, MemoryBench, PostgresBench

TOPICS = [
    Topic(name="orders", types=frozenset({MessageType.NORMAL, MessageType.TRANSACTION}), queue_count=4),
    Topic(name="steps", types=frozenset({MessageType.FIFO, MessageType.TRANSACTION}), queue_count=4),
    Topic(
        name="later", types=frozenset({MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION}), queue_count=2
    ),
    Topic(name="bound", types=frozenset({MessageType.TRANSACTION}), queue_count=2),
    Topic(name="plain", types=frozenset({MessageType.NORMAL}), queue_count=2),
]


@pytest.fixture(params=["memory", "two_phase"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A broker that takes half messages."""
    yield from opened(request)


@pytest.fixture(params=["memory", "two_phase", "atomic"])
def any_path(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A broker on any path."""
    yield from opened(request)


def opened(request: pytest.FixtureRequest) -> Iterator[Bench]:
    make: dict[str, Callable[[], Bench]] = {
        "memory": lambda: MemoryBench(TOPICS),
        "two_phase": lambda: PostgresBench(request.getfixturevalue("broker_url"), TOPICS),
        "atomic": lambda: AtomicBench(request.getfixturevalue("broker_url"), TOPICS),
    }
    bench = make[request.param]()
    yield bench
    bench.close()
