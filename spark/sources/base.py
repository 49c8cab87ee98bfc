"""The port of a source: check a table, read it by time or by key, and tell up to when it is complete."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructField, StructType, TimestampType

from ..rules.rule import FieldType


class ColumnKind(enum.Enum):
    """The form in which a column arrives in Spark."""

    TEXT = "text"
    BIGINT = "bigint"
    TIMESTAMP = "timestamp"
    BINARY = "binary"
    MICROSECONDS = "microseconds"
    """A time as the text of its microseconds since 1970, so that all compared fields arrive as text."""


_SPARK_TYPES: dict[ColumnKind, DataType] = {
    ColumnKind.TEXT: StringType(),
    ColumnKind.BIGINT: LongType(),
    ColumnKind.TIMESTAMP: TimestampType(),
    ColumnKind.BINARY: BinaryType(),
    ColumnKind.MICROSECONDS: StringType(),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the result: `expression` is a column name or an SQL expression over the table."""

    name: str
    expression: str
    kind: ColumnKind = ColumnKind.TEXT
    compared_as: FieldType | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSelection:
    """Columns and rows of a table. `time` limits it to a window; `span` is an increasing id to split it by."""

    table: str
    columns: tuple[Column, ...]
    key: str
    time: str | None = None
    conditions: tuple[str, ...] = ()
    equals: tuple[tuple[str, str], ...] = ()
    span: str | None = None
    in_broker: bool = False

    @property
    def schema(self) -> StructType:
        """The schema of the result; every column is nullable."""
        return StructType([StructField(column.name, _SPARK_TYPES[column.kind], True) for column in self.columns])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceBoundary:
    """Up to when a source is complete, and the evidence for it. Written into every result."""

    database: str
    taken_at: datetime
    watermark: datetime | None
    identity: str = ""
    snapshot: str = ""
    is_replica: bool = False
    notes: list[str] = field(default_factory=list)


class DataSource(Protocol):
    """An opened database or folder. Raises UsageProblem and RunIncomplete, never an error of a driver."""

    def open(self, timed: Sequence[TableSelection]) -> SourceBoundary:
        """Take a snapshot, if the source has any; all reads until `close` see it."""

    def close(self) -> None:
        """Release the snapshot. Data frames of this source that were not evaluated yet can no longer be."""

    def check(self, selection: TableSelection) -> None:
        """Raise UsageProblem unless table, columns and types are there and comparable."""

    def is_empty(self, selection: TableSelection, since: datetime | None = None) -> bool:
        """Whether the selection has no row (with its time from `since` on)."""

    def read(
        self, selections: Sequence[TableSelection], since: datetime | None, until: datetime | None = None
    ) -> DataFrame:
        """All rows with `since <= time < until` of selections of one shape."""

    def repeated(self, selection: TableSelection, since: datetime) -> DataFrame | None:
        """Rows before `since` whose key a row from `since` on has too; None where a unique index excludes that."""

    def read_keys(self, wanted: Sequence[tuple[TableSelection, Sequence[str]]]) -> DataFrame:
        """All rows with one of the keys beside each selection, in any window; the selections have one shape."""

    def volume(
        self, selection: TableSelection, since: datetime | None, bucket_seconds: int
    ) -> list[tuple[datetime, int]]:
        """The number of rows in each bucket of time."""

    def horizon(self, topic: str) -> datetime | None:
        """Broker only: messages stored before may have been removed by retention. None: nothing was."""
