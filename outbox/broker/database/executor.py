"""A connection and the schema of the broker's tables on it, bound once instead of carried as a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.pq import Format
from psycopg.rows import tuple_row

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement

_Row = TypeVar("_Row")


class Executor:
    """Executes the broker's statements; whatever factories the application's connection prefers, rows are plain tuples.

    Parameters are bound by the server, results are binary. Not thread-safe beyond what the connection is.
    """

    __slots__ = ("connection", "schema")

    def __init__(self, connection: Connection, schema: str) -> None:
        self.connection = connection
        self.schema = schema

    def execute(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """Execute a statement; the cursor has its rows and its `rowcount`.

        `prepare`: None leaves it to psycopg, which prepares what is executed often; False plans with the values.
        """
        return cursor_on(self.connection).execute(statement.on(self.schema), parameters, prepare=prepare)

    def row(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> tuple[Any, ...] | None:
        """The first row, None without one."""
        return self.execute(statement, parameters, prepare=prepare).fetchone()

    def call(self, statement: Statement, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """The first row of a statement with numbered parameters, for hot paths: one with names is translated first.

        It is prepared where the connection prepares anything.
        """
        cursor = psycopg.RawCursor(self.connection, row_factory=tuple_row)
        cursor.format = Format.BINARY
        return cursor.execute(statement.on(self.schema), values, prepare=True).fetchone()

    def one(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> tuple[Any, ...]:
        """The row of a statement that always has one."""
        found = self.row(statement, parameters, prepare=prepare)
        assert found is not None
        return found

    def rows(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> list[tuple[Any, ...]]:
        """All rows."""
        return self.execute(statement, parameters, prepare=prepare).fetchall()

    def objects(
        self,
        row_type: type[_Row],
        statement: Statement,
        parameters: Mapping[str, Any] | None = None,
        *,
        prepare: bool | None = None,
    ) -> list[_Row]:
        """All rows as objects whose fields are named like the columns. Not for hot paths: names cost."""
        cursor = self.execute(statement, parameters, prepare=prepare)
        # Fetched first: on an application's connection in pipeline mode a result is described only when it is here.
        rows = cursor.fetchall()
        names = [column.name for column in cursor.description or ()]
        return [row_type(**dict(zip(names, row, strict=True))) for row in rows]

    def count(self, statement: Statement, parameters: Mapping[str, Any] | None = None) -> int:
        """How many rows it changed."""
        return self.execute(statement, parameters).rowcount
