"""A connection and the schema of the broker's tables on it, bound once instead of carried as a pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import psycopg
from psycopg.rows import class_row

from outbox.broker.database.arrays import Packed, PackedDumper
from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement

_Row = TypeVar("_Row")
_Cursor = psycopg.Cursor[tuple[Any, ...]]


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
    ) -> _Cursor:
        """Execute a statement; the cursor has its rows and its `rowcount`."""
        return self._cursor().execute(statement.on(self.schema), parameters, prepare=prepare)

    def row(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> tuple[Any, ...] | None:
        """The first row, None without one."""
        return self.execute(statement, parameters, prepare=prepare).fetchone()

    def rows(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> list[tuple[Any, ...]]:
        """All rows."""
        return self.execute(statement, parameters, prepare=prepare).fetchall()

    def objects(
        self, row_type: type[_Row], statement: Statement, parameters: Mapping[str, Any] | None = None
    ) -> list[_Row]:
        """All rows as objects whose fields are named like the columns. Not for hot paths: names cost."""
        cursor = psycopg.Cursor(self.connection, row_factory=class_row(row_type))
        self._set_up(cursor)
        return cursor.execute(statement.on(self.schema), parameters).fetchall()

    def count(self, statement: Statement, parameters: Mapping[str, Any] | None = None) -> int:
        """How many rows it changed."""
        return self.execute(statement, parameters).rowcount

    def _cursor(self) -> _Cursor:
        cursor = psycopg.Cursor(self.connection, row_factory=psycopg.rows.tuple_row)
        self._set_up(cursor)
        return cursor

    @staticmethod
    def _set_up(cursor: psycopg.Cursor[Any]) -> None:
        cursor.format = psycopg.pq.Format.BINARY
        cursor.adapters.register_dumper(Packed, PackedDumper)
