"""The sessions in which tests look into brokers and sequence them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psycopg

from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.contrib.django.database.aliases import broker_database, broker_executor

_Result = TypeVar("_Result")
_open: dict[BrokerDatabase, Connection] = {}


def in_session(work: Callable[[Connection], _Result]) -> _Result:
    """The result of a function of a connection to the broker, in autocommit.

    The session stays open for the next call, because a new one begins with empty caches: it takes longer than most of
    the work. If a test has ended all sessions of the database, the work is done again in a new one.
    """
    database = broker_database()
    try:
        return work(_connection(database))
    except psycopg.OperationalError:
        _open.pop(database).close()
        return work(_connection(database))


def _connection(database: BrokerDatabase) -> Connection:
    if database not in _open or _open[database].closed:
        _open[database] = database.connect(name="test")
    return _open[database]


def close_sessions() -> None:
    """Close them all."""
    while _open:
        _open.popitem()[1].close()


@contextmanager
def broker_connection() -> Iterator[tuple[Connection, str]]:
    """The connection and the schema of `broker_executor`."""
    with broker_executor() as run:
        yield run.connection, run.schema
