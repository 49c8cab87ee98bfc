"""Parquet and CSV folders, one file or folder per table: exports of the same tables and views."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from ..common.errors import RunIncomplete, TableMissing, UsageProblem
from ..common.options import parse_moment
from ..rules.rule import DatabaseRule, SourceKind
from . import bounded, values
from .base import Column, ColumnKind, SourceBoundary, TableSelection
from .sql import is_column


class FrameSource:
    """A `base.DataSource` whose tables Spark can read without this package's reader. Subclasses implement `table`."""

    def __init__(self, spark: SparkSession, database: DatabaseRule) -> None:
        self._spark, self._database = spark, database
        self._tables: dict[str, DataFrame] = {}

    def _table(self, selection: TableSelection) -> DataFrame:
        if selection.table not in self._tables:
            self._tables[selection.table] = self.table(selection)
        return self._tables[selection.table]

    def table(self, selection: TableSelection) -> DataFrame:
        """The whole table."""
        raise NotImplementedError

    def open(self, timed: Sequence[TableSelection]) -> SourceBoundary:
        """Files are complete up to the configured watermark.

        Without a watermark, the source reads the newest time of each table. The source assumes that the files are
        complete up to the earliest of these times.
        """
        now = datetime.now(UTC)
        notes = []
        if self._database.watermark:
            watermark = parse_moment(self._database.watermark)
        else:
            newest = [(moment, each.table) for each in timed if (moment := self._newest(each)) is not None]
            if not newest:
                raise RunIncomplete(
                    f"database {self._database.name!r} has no row with a time, so the run cannot tell up to which time "
                    f"the database is complete. "
                    f'Write watermark = "…" in [database.{self._database.name}].'
                )
            watermark, table = min(newest)
            notes.append(
                f"no watermark is given, so the run assumes that the files are complete up to the newest time in "
                f"{table!r}. Write the start of the export into the rules file: watermark = "
                f'"…" in [database.{self._database.name}]'
            )
        return SourceBoundary(
            database=self._database.name, taken_at=now, watermark=watermark, identity=self._database.kind, notes=notes
        )

    def _newest(self, selection: TableSelection) -> datetime | None:
        # The query returns microseconds, because collect() would convert a timestamp to this machine's local time.
        frame = values.in_calendar(self.read([selection], None).agg(F.max("at").alias("at")))
        value = frame.select(F.unix_micros("at")).collect()[0][0]
        return None if value is None else datetime.fromtimestamp(value / 1_000_000, UTC)

    def close(self) -> None:
        self._tables.clear()

    def gave_way(self) -> None:
        """Files have no locks."""

    def check(self, selection: TableSelection) -> None:
        try:
            _ = self._selected(self._limited(selection, None), selection).schema
        except AnalysisException as error:
            raise UsageProblem(
                f"table {selection.table!r} of {self._database.name!r} cannot be read as the rules say: "
                f"{str(error).splitlines()[0]} Correct the rules file, or the export."
            ) from error

    def is_empty(self, selection: TableSelection, since: datetime | None = None) -> bool:
        return self._limited(selection, since).isEmpty()

    def read(
        self, selections: Sequence[TableSelection], since: datetime | None, until: datetime | None = None
    ) -> DataFrame:
        frames = [self._selected(self._limited(selection, since, until), selection) for selection in selections]
        return reduce(DataFrame.unionByName, frames)

    def repeated(self, selection: TableSelection, since: datetime) -> DataFrame | None:
        key = _expression(selection.key, self._table(selection)).cast("string")
        newer = self._limited(selection, since).select(key.alias("newer_key")).distinct()
        older = self._limited(selection, None, since)
        return self._selected(older.join(newer, key == F.col("newer_key"), "left_semi"), selection)

    def read_keys(self, wanted: Sequence[tuple[TableSelection, Sequence[str]]]) -> DataFrame:
        return reduce(DataFrame.unionByName, [self._of_keys(selection, keys) for selection, keys in wanted])

    def _of_keys(self, selection: TableSelection, keys: Sequence[str]) -> DataFrame:
        wanted = self._spark.createDataFrame([(key,) for key in keys], "wanted_key string")
        frame = self._limited(selection, None)
        key = F.coalesce(_expression(selection.key, frame).cast("string"), F.lit(""))
        return self._selected(frame.join(F.broadcast(wanted), key == F.col("wanted_key"), "left_semi"), selection)

    def horizon(self, topic: str) -> datetime | None:
        """Always None. If old messages are missing in an export, the user must give --from."""
        return None

    def _limited(self, selection: TableSelection, since: datetime | None, until: datetime | None = None) -> DataFrame:
        frame = self._table(selection)
        for condition in selection.conditions:
            frame = frame.where(F.expr(condition))
        for name, value in selection.equals:
            frame = frame.where(F.col(name) == F.lit(value))
        if selection.time is not None:
            time = _moment(_expression(selection.time, frame), selection.time, frame)
            frame = frame.where(time.isNotNull() if since is None else time >= F.lit(since))
            frame = frame if until is None else frame.where(time < F.lit(until))
        return frame

    def _selected(self, frame: DataFrame, selection: TableSelection) -> DataFrame:
        is_csv = self._database.kind is SourceKind.CSV
        return frame.select(*[_column(column, frame, is_csv=is_csv) for column in selection.columns])


# The CSV form of COPY: an empty field between two commas is null, and "" is the empty text. NUL is the null value,
# because PostgreSQL's texts cannot contain it.
_CSV: Final = {"header": "true", "multiLine": "true", "escape": '"', "nullValue": "\0", "emptyValue": ""}
# Without these options, Spark would read a malformed value as null, and the null would become a false finding.
_STRICT: Final = {"mode": "FAILFAST", "enforceSchema": "false", "columnPruning": "false"}


class FileSource(FrameSource):
    """Parquet or CSV files. All columns of a CSV file are texts; an empty field without quotes is null."""

    def __init__(self, spark: SparkSession, database: DatabaseRule) -> None:
        super().__init__(spark, database)
        self._plain: set[str] = set()

    def table(self, selection: TableSelection) -> DataFrame:
        """Raises TableMissing if the table has no file."""
        suffix = self._database.kind.value
        base = f"{self._database.location.rstrip('/')}/{selection.table}"
        if self._database.kind is SourceKind.PARQUET:
            self._check_plain(selection.table)
        for path in (base, f"{base}.{suffix}"):
            try:
                if self._database.kind is SourceKind.CSV:
                    return self._spark.read.options(**_CSV, **_STRICT).csv(path)
                return self._spark.read.parquet(path)
            except AnalysisException as error:
                if "TIMESTAMP(NANOS" in str(error):
                    raise UsageProblem(
                        f"{path} has times in nanoseconds, which Spark cannot read. Export the table again with times "
                        f"in microseconds (pandas, Arrow: coerce_timestamps='us')."
                    ) from error
                if "PATH_NOT_FOUND" not in str(error):
                    raise UsageProblem(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
        raise TableMissing(
            f"table {selection.table!r} of {self._database.name!r} is not there: neither {base} nor {base}.{suffix} "
            f"exists. Correct path in the rules file, or export the table."
        )

    def _check_plain(self, table: str) -> None:
        """Raise UsageProblem if the files belong to a table format, because only the log of such a table shows which
        files are current."""
        folder = self._database.location.rstrip("/")
        for part in ("", *table.split("/")):
            folder = f"{folder}/{part}".rstrip("/")
            if folder not in self._plain and self._is_there(f"{folder}/{_LOGS}"):
                raise UsageProblem(
                    f"{folder} is a table of Delta Lake, Iceberg or Hudi, and kind = 'parquet' would also read files "
                    f"with rows that were removed or replaced. Write kind = 'delta' or kind = 'iceberg'; of Hudi, "
                    f"export the rows as Parquet into a folder of their own."
                )
            self._plain.add(folder)

    def _is_there(self, path: str) -> bool:
        try:
            self._spark.read.format("binaryFile").load(path)
        except AnalysisException as error:
            if "PATH_NOT_FOUND" in str(error):
                return False
            raise UsageProblem(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
        return True


# The files by which the folder of a table of Delta Lake, Iceberg or Hudi is recognised. One pattern for all, because
# Spark takes its time for each path that is not there.
_LOGS: Final = "{_delta_log,metadata/*.metadata.json,.hoodie}"
MAX_TEXT: Final = 2**31 - 1


def _expression(source: str, frame: DataFrame) -> SparkColumn:
    """A column or an expression of the rules as a Spark column.

    A dotted name is a field of a struct. Raises UsageProblem if the table also has a column of that name, because a run
    would silently compare the other value.
    """
    if is_column(source):
        return F.col(source)
    if "." in source and source in frame.columns:
        outer, _, inner = source.partition(".")
        raise UsageProblem(
            f"{source!r} is a field of column {outer!r}, but the table has a column of that name: write `{source}` in "
            f"backticks for the column, ({outer}).{inner} for the field."
        )
    return F.expr(source)


def _moment(value: SparkColumn, expression: str, frame: DataFrame) -> SparkColumn:
    """A column as a time. A text must contain a date, because Spark would add today's date to a text without a date."""
    kind = frame.select(value).schema[0].dataType
    return values.checked_moment(value, expression) if isinstance(kind, StringType) else value.cast("timestamp")


def _column(column: Column, frame: DataFrame, *, is_csv: bool) -> SparkColumn:
    value = _expression(column.expression, frame)
    binary = value.cast("binary")
    if is_csv:
        # COPY writes bytea as \\x and hexadecimal digits.
        text = value.cast("string")
        binary = F.when(text.startswith("\\x"), F.unhex(F.substring(text, 3, MAX_TEXT))).otherwise(binary)
    if column.kind in (ColumnKind.TIMESTAMP, ColumnKind.MICROSECONDS):
        moment = _moment(value, column.expression, frame)
        value = moment if column.kind is ColumnKind.TIMESTAMP else F.unix_micros(moment).cast("string")
        return value.alias(column.name)
    as_kind = {
        ColumnKind.TEXT: value.cast("string"),
        ColumnKind.BIGINT: value.cast("bigint"),
        ColumnKind.BINARY: binary,
        ColumnKind.BOUNDED: bounded.in_spark(value.cast("string")),
    }
    return as_kind[column.kind].alias(column.name)
