"""A database with an empty broker and the table of the shop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from tests.broker.support import TOPICS
from tests.sqlalchemy.support import url_of


@pytest.fixture
def database(broker_url: str) -> BrokerDatabase:
    """A broker with the topics of tests.broker.support, and the table of the shop."""
    database = BrokerDatabase(broker_url)
    with contextlib.closing(database.open(name="setup")) as connection:
        declare_topics(Executor(connection, database.schema), TOPICS)
        connection.execute("CREATE TABLE shop_order (number text PRIMARY KEY)")
    return database


@pytest.fixture
def connection(database: BrokerDatabase) -> Iterator[BrokerConnection]:
    """A connection in autocommit."""
    with contextlib.closing(database.open(name="test")) as connection:
        yield connection


@pytest.fixture
def engine(database: BrokerDatabase) -> Iterator[Engine]:
    """An engine of psycopg."""
    engine = create_engine(url_of(database.conninfo))
    yield engine
    engine.dispose()
