"""Execute the broker's statements on a connection, and represent PostgreSQL's snapshots as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.rows import tuple_row
from psycopg.types.datetime import TimestamptzBinaryLoader
from psycopg.types.json import JsonbBinaryLoader

from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement

_Object = TypeVar("_Object")
# The numbers of the types in every PostgreSQL.
_TIMESTAMPTZ: Final = 1184
_JSONB: Final = 3802


class BinaryValue(bytes):
    """The binary form of a value. A cast in the statement names the type of the value."""


class PackedDumper(Dumper):
    """Sends a `BinaryValue` unchanged."""

    format = Format.BINARY
    oid = 0

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)


# Stand for times that Python cannot hold: -infinity, years before 1 and after 9999. Every time zone can show these two.
EARLIEST: Final = datetime(1, 1, 2, tzinfo=UTC)
LATEST: Final = datetime(9999, 12, 30, tzinfo=UTC)


class _ContainedTime(TimestamptzBinaryLoader):
    """Loads every time of PostgreSQL, because one row of other code must not fail the rows that are read with it."""

    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return LATEST if int.from_bytes(data, "big", signed=True) > 0 else EARLIEST


class _ContainedJson(JsonbBinaryLoader):
    """Loads every document of PostgreSQL, for the same reason.

    Python refuses numbers of more than 4,300 digits, and documents that are nested too deeply. A list stands for them:
    to the readers of headers it is what a list of headers is.
    """

    def load(self, data: Buffer) -> Any:
        try:
            return super().load(data)
        except (ValueError, RecursionError):
            return []


def time_of(text: str) -> datetime:
    """Return a time that PostgreSQL has written as text; EARLIEST or LATEST for a time that Python cannot hold."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return EARLIEST if text.startswith("-") or text.endswith("BC") else LATEST


def cursor_on(connection: Connection, *, contains_times: bool = True) -> psycopg.RawCursor[tuple[Any, ...]]:
    """Return a cursor for the texts of `Statement.on`, with plain tuples, regardless of the application's settings.

    `contains_times=False` is faster, and refuses times that Python cannot hold.
    """
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    cursor.format = Format.BINARY
    cursor.adapters.register_dumper(BinaryValue, PackedDumper)
    cursor.adapters.register_loader(_JSONB, _ContainedJson)
    if contains_times:
        cursor.adapters.register_loader(_TIMESTAMPTZ, _ContainedTime)
    return cursor


class Row(SimpleNamespace):
    """A row that is only shown: its attributes are the columns of its statement."""


class Executor:
    """Executes the broker's statements. Rows are plain tuples, regardless of the application's row factory.

    The server binds the parameters, and returns the results in binary form. It is as thread-safe as its connection.
    """

    __slots__ = ("connection", "schema")

    def __init__(self, connection: Connection, schema: str) -> None:
        self.connection = connection
        self.schema = schema

    def execute(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """Execute a statement. The returned cursor has the statement's rows and its `rowcount`.

        If `prepare` is None, psycopg decides, and prepares frequent statements. If `prepare` is False, PostgreSQL plans
        the statement with the actual values.
        """
        text, names = statement.on(self.schema)
        values = None if parameters is None else [parameters[name] for name in names]
        return cursor_on(self.connection).execute(text, values, prepare=prepare)

    def row(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> tuple[Any, ...] | None:
        """Return the first row, or None if there is no row."""
        return self.execute(statement, parameters, prepare=prepare).fetchone()

    def one(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> tuple[Any, ...]:
        """Return the row of a statement that always returns one row."""
        found = self.row(statement, parameters, prepare=prepare)
        assert found is not None
        return found

    def rows(
        self, statement: Statement, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
    ) -> list[tuple[Any, ...]]:
        return self.execute(statement, parameters, prepare=prepare).fetchall()

    def objects(
        self,
        row_type: type[_Object],
        statement: Statement,
        parameters: Mapping[str, Any] | None = None,
        *,
        prepare: bool | None = None,
    ) -> list[_Object]:
        """Return all rows as objects whose fields are named like the columns. This method is too slow for hot paths."""
        cursor = self.execute(statement, parameters, prepare=prepare)
        # Fetch the rows before reading the description of the columns, because in pipeline mode rows and description
        # arrive together.
        rows = cursor.fetchall()
        names = [column.name for column in cursor.description or ()]
        return [row_type(**dict(zip(names, row, strict=True))) for row in rows]

    def count(self, statement: Statement, parameters: Mapping[str, Any] | None = None) -> int:
        """Return the number of rows that the statement changed."""
        return self.execute(statement, parameters).rowcount


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot sees exactly the transactions below `xmax` that are not in `in_progress`."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form of pg_snapshot, `xmin:xmax:xip,…`."""
        xmin, xmax, in_progress = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, in_progress.split(","))) if in_progress else ())

    @property
    def text(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"
