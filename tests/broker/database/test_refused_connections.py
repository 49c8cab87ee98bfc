"""A server that refuses a connection is recognized by the real errors, and no other error is taken for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import psycopg_pool
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.operations.rules import unusable
from outbox.errors import BrokerUnavailable
from outbox.utils.refused_connections import is_refused, says_refused

ROLE = f"refused_{os.getpid()}"


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    """A role that may open no session."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN CONNECTION LIMIT 0").format(sql.Identifier(ROLE)))
        yield make_conninfo(server_url, user=ROLE)
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(ROLE)))


def test_a_refused_connection(url: str, server_url: str) -> None:
    with pytest.raises(psycopg.OperationalError) as plain:
        psycopg.connect(url)
    assert is_refused(plain.value)
    with pytest.raises(BrokerUnavailable, match=r"refuses another connection.*too many connections for role") as named:
        BrokerDatabase(url).open()
    assert is_refused(named.value)
    assert [one.name for one in unusable(named.value).conditions] == ["connections_refused"]
    with (
        closing(psycopg_pool.ConnectionPool(server_url, min_size=1, max_size=1, open=True)) as pool,
        pool.connection(),
        pytest.raises(psycopg_pool.PoolTimeout) as waited,
        pool.connection(timeout=0.05),
    ):
        pass
    assert is_refused(waited.value)
    own = LookupError("a handler's own error while it handled this one")
    own.__context__ = plain.value
    assert is_refused(own)


def test_other_errors(server_url: str) -> None:
    found: list[BaseException] = [ValueError("too many connections"), KeyError(1040)]
    for bad in (make_conninfo(server_url, dbname="nowhere"), make_conninfo(server_url, port="1")):
        try:
            psycopg.connect(bad)
        except psycopg.OperationalError as error:
            found.append(error)
    with psycopg.connect(server_url) as connection:
        for statement in ("SELECT 1 / 0", "RAISE", "SELECT pg_sleep(1)"):
            try:
                with connection.transaction():
                    connection.execute("SET LOCAL statement_timeout = 20")
                    connection.execute(statement)
            except psycopg.Error as error:
                found.append(error)
    assert len(found) == 7
    assert [one for one in found if is_refused(one)] == []


@pytest.mark.parametrize(
    "text",
    [
        "FATAL:  sorry, too many clients already",
        "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
        'FATAL:  too many connections for database "shop"',
        "FATAL:  no more connections allowed (max_client_conn)",
        "FATAL: Max client connections reached",
    ],
)
def test_texts_of_servers_and_poolers(text: str) -> None:
    assert says_refused(text)
    assert is_refused(psycopg.OperationalError(text))


def test_mariadb() -> None:
    class OperationalError(Exception):
        """As the driver of MariaDB raises it."""

    error: Any = OperationalError(1040, "Too many connections")
    assert is_refused(error)
