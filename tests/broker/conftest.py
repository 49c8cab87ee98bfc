"""A fresh broker per test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.postgres import PostgresBroker
from tests.broker.bench import ConsumptionBench
from tests.broker.support import TOPICS


@pytest.fixture
def database(broker_url: str) -> BrokerDatabase:
    """An empty broker with the topics of tests.broker.support."""
    database = BrokerDatabase(broker_url)
    with contextlib.closing(database.open(name="setup")) as connection:
        declare_topics(Executor(connection, database.schema), TOPICS)
    return database


@pytest.fixture
def connection(database: BrokerDatabase) -> Iterator[BrokerConnection]:
    """A connection in autocommit."""
    with contextlib.closing(database.open(name="test")) as connection:
        yield connection


@pytest.fixture
def broker(database: BrokerDatabase) -> Iterator[PostgresBroker]:
    """The port under test."""
    broker = PostgresBroker(database)
    yield broker
    broker.close()


@pytest.fixture
def bench(broker_url: str) -> Iterator[ConsumptionBench]:
    """A fresh broker with consumers."""
    bench = ConsumptionBench(broker_url)
    yield bench
    bench.close()
