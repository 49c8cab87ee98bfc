"""One PostgreSQL for the whole run, one database per test, made from a template."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from outbox.broker import embedded

SERVER_SETTINGS = {
    "max_connections": "400",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "max_prepared_transactions": "20",
}
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a PostgreSQL in which databases can be created."""
    with tempfile.TemporaryDirectory(prefix="outbox-pg-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "data"
        yield embedded.server_url(data, settings=SERVER_SETTINGS)
        if embedded.URL_VARIABLE not in os.environ:
            embedded.stop(data)


@pytest.fixture(scope="session")
def broker_template(server_url: str) -> str:
    """The name of a template database with the broker's schema installed."""
    from outbox.broker.install import install

    name = f"outbox_template_{os.getpid()}"
    url = embedded.create_database(server_url, name)
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection, "outbox")
    return name


@pytest.fixture
def new_database(server_url: str) -> Iterator[Callable[..., str]]:
    """A function that creates a database (from a template) and returns its URL; all are dropped afterwards."""
    created: list[str] = []

    def create(*, template: str = "template1") -> str:
        name = f"outbox_test_{os.getpid()}_{next(_numbers)}"
        created.append(name)
        return embedded.create_database(server_url, name, template=template)

    yield create
    with psycopg.connect(server_url, autocommit=True) as connection:
        for name in created:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def broker_url(new_database: Callable[..., str], broker_template: str) -> str:
    """The URL of a fresh database that holds an empty broker in schema `outbox`."""
    return new_database(template=broker_template)
