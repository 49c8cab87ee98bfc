"""The interface of a source: it checks a table, reads it by time or by key, and returns the time up to which the source
is complete."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructField, StructType, TimestampType

from ..common.errors import RunIncomplete
from ..rules.rule import FieldType


class ColumnKind(enum.Enum):
    """The form in which a column arrives in Spark."""

    TEXT = "text"
    BIGINT = "bigint"
    TIMESTAMP = "timestamp"
    BINARY = "binary"
    MICROSECONDS = "microseconds"
    """A time as its microseconds since 1970, written as text, because all compared fields arrive as text."""
    BOUNDED = "bounded"
    """A text in its bounded form (module `bounded`)."""


# All other columns arrive as texts.
_SPARK_TYPES: dict[ColumnKind, DataType] = {
    ColumnKind.BIGINT: LongType(),
    ColumnKind.TIMESTAMP: TimestampType(),
    ColumnKind.BINARY: BinaryType(),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the result. `expression` is a column name or an SQL expression over the table."""

    name: str
    expression: str
    kind: ColumnKind = ColumnKind.TEXT
    compared_as: FieldType | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSelection:
    """Columns and rows of a table. A source uses the column `time` to read only the rows of a window. A source uses the
    column `span`, an increasing id, to split the table into several queries."""

    table: str
    columns: tuple[Column, ...]
    key: str
    time: str | None = None
    conditions: tuple[str, ...] = ()
    equals: tuple[tuple[str, str], ...] = ()
    span: str | None = None
    in_broker: bool = False
    # A run without this table reports less. `check` raises TableMissing if the role may not read the table.
    is_optional: bool = False

    @property
    def schema(self) -> StructType:
        """The schema of the result; every column is nullable."""
        kinds = {column.name: _SPARK_TYPES.get(column.kind, StringType()) for column in self.columns}
        return StructType([StructField(name, kind, True) for name, kind in kinds.items()])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceBoundary:
    """The time up to which a source is complete, and the evidence for this time. Every result contains this time and
    this evidence for each of the run's sources."""

    database: str
    taken_at: datetime
    watermark: datetime | None
    identity: str = ""
    snapshot: str = ""
    notes: list[str] = field(default_factory=list)


class DataSource(Protocol):
    """A database or folder with tables. A method of a source raises UsageProblem or RunIncomplete, never an error of a
    driver."""

    def open(self, timed: Sequence[TableSelection]) -> SourceBoundary:
        """Take a snapshot, if the source has snapshots. All reads until `close` see only this snapshot."""

    def close(self) -> None:
        """Release the snapshot. After `close`, Spark cannot evaluate data frames of this source any more."""

    def gave_way(self) -> RunIncomplete | None:
        """The error of the run, if the source has ended its snapshot because another session waited for its locks."""

    def check(self, selection: TableSelection) -> None:
        """Raise UsageProblem if the table or a column does not exist, or if a column cannot be compared as its type."""

    def is_empty(self, selection: TableSelection, since: datetime | None = None) -> bool:
        """Whether the selection has no row; if `since` is given, whether it has no row with a time from `since` on."""

    def read(
        self, selections: Sequence[TableSelection], since: datetime | None, until: datetime | None = None
    ) -> DataFrame:
        """All rows of the selections with `since <= time < until`. The selections must have the same columns."""

    def repeated(self, selection: TableSelection, since: datetime) -> DataFrame | None:
        """The rows before `since` that have the same key as a row from `since` on; None if a unique index excludes two
        rows with one key."""

    def read_keys(self, wanted: Sequence[tuple[TableSelection, Sequence[str]]]) -> DataFrame:
        """For each selection, all rows with one of its keys, at any time. The selections must have the same columns."""

    def horizon(self, topic: str) -> datetime | None:
        """The time before which retention may have removed messages of the topic; None if retention has removed no
        message. A run calls this method only for the source of the broker."""


@contextmanager
def released(sources: Collection[DataSource]) -> Iterator[None]:
    """Close the sources at the end of the block. If the block fails because a source gave way to another session, the
    error names this session."""
    try:
        yield
    except Exception as error:
        for each in sources:
            if (gave_way := each.gave_way()) is not None:
                raise gave_way from error
        raise
    finally:
        for each in sources:
            each.close()
