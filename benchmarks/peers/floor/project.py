"""Settings: none. The tables have no models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg import pq

APPS: list[str] = []
TWO_PHASE: Final = os.environ.get("OUTBOX_BENCH_BROKER") != os.environ.get("OUTBOX_BENCH_APPLICATION")
TABLES: Final = """
CREATE TABLE message (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, transaction_id uuid, body text NOT NULL);
CREATE TABLE decision (transaction_id uuid PRIMARY KEY);
CREATE TABLE ledger (transaction_id uuid PRIMARY KEY);
CREATE TABLE inbox (id bigint PRIMARY KEY);
"""


def settings(databases: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def connect() -> psycopg.Connection[tuple[Any, ...]]:
    """A connection to the database of the messages."""
    name = f"bench-{os.environ['OUTBOX_BENCH_ROLE']}"
    return psycopg.connect(os.environ["OUTBOX_BENCH_BROKER"], autocommit=True, application_name=name)


def begin(connection: psycopg.Connection[Any]) -> None:
    """Begin Django's transaction before a prepared statement: psycopg begins it with the first one of its cursors."""
    result = connection.pgconn.exec_(b"BEGIN")
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise RuntimeError(result.get_error_message())


class Prepared:
    """A statement that libpq executes without psycopg's cursor. Values and results are texts."""

    def __init__(self, connection: psycopg.Connection[Any], name: str, text: str) -> None:
        self._pgconn = connection.pgconn
        self._name = name.encode()
        self._checked(self._pgconn.prepare(self._name, text.encode()))

    def __call__(self, *values: str) -> list[list[bytes | None]]:
        result = self._checked(self._pgconn.exec_prepared(self._name, [value.encode() for value in values]))
        return [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]

    def _checked(self, result: pq.abc.PGresult) -> pq.abc.PGresult:
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
            raise RuntimeError(result.get_error_message())
        return result
