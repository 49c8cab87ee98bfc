"""Reads a PostgreSQL database in one exported snapshot. A coordinator connection holds the snapshot open, and the
transactions of the executors use this snapshot."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from ..common.errors import ReconcileError, RunIncomplete, TableMissing, UsageProblem
from ..common.options import parse_moment
from ..rules.rule import DatabaseRule, FieldType
from . import adbc, sql, watermark
from .base import Column, SourceBoundary, TableSelection
from .blocking import BlockingWatch

ROWS_PER_PARTITION: Final = 500_000
KEYS_PER_PARTITION: Final = 5_000
PAGES_PER_TASK: Final = 8_192
MAX_TASKS: Final = 256
# Queries of PostgreSQL's catalogue, and the PostgreSQL types that a field may have.
_IDENTITY: Final = "SELECT system_identifier::text FROM pg_control_system()"
_COLUMN_TYPES: Final = """
SELECT attname::text, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = to_regclass({table}) AND attnum > 0 AND NOT attisdropped
"""
_UNIQUE: Final = """
SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = to_regclass({table}) AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indnkeyatts = 1
  AND i.indpred IS NULL AND a.attname = {column} AND a.attnotnull
"""
# The pages of a table with all its partitions, and those of the largest one. No row for a view, which one query reads,
# and for a table with a partition on another server.
_PAGES: Final = """
SELECT sum(pg_relation_size(oid) / current_setting('block_size')::bigint)::bigint,
       max(pg_relation_size(oid) / current_setting('block_size')::bigint)
FROM pg_class WHERE oid = to_regclass({table}) OR oid IN (SELECT relid FROM pg_partition_tree(to_regclass({table})))
HAVING bool_and(relkind IN ('r', 'm', 'p'))
"""
_COMPARABLE: Final = {
    FieldType.TEXT: ("text", "character varying", "character", "name", "uuid", "citext", "integer", "bigint"),
    FieldType.INTEGER: ("smallint", "integer", "bigint", "numeric"),
    FieldType.DECIMAL: ("smallint", "integer", "bigint", "numeric", "real", "double precision"),
    FieldType.BOOLEAN: ("boolean",),
    FieldType.TIMESTAMP: ("timestamp with time zone", "timestamp without time zone", "date"),
    FieldType.DATE: ("date",),
    FieldType.UUID: ("uuid", "text", "character varying"),
}


class PostgresSource:
    """A `base.DataSource`: one PostgreSQL database. `open` takes the snapshot, which all reads until `close` see."""

    def __init__(self, spark: SparkSession, database: DatabaseRule, name: str = adbc.NAME) -> None:
        self._spark, self._database, self._name = spark, database, name
        self._coordinator: Any = None
        self._blocking: BlockingWatch | None = None
        self._snapshot = ""
        self._types: dict[str, dict[str, str]] = {}

    def open(self, timed: Sequence[TableSelection]) -> SourceBoundary:
        self.close()
        connection = self._connect()
        try:
            activity = watermark.Activity(*self._latest(connection, watermark.OLDEST))
            identifier = self._system_identifier()
            # Read before the snapshot is taken: so the snapshot has all transactions that had ended at this time.
            complete_up_to, notes = watermark.of(self._database, activity)
            # The joins of the checksums need this memory.
            for statement in adbc.begin(adbc.SNAPSHOT, self._name, settings=("work_mem = '64MB'",)):
                self._execute(connection, statement)
            exported = self._rows(connection, "SELECT pg_export_snapshot(), pg_current_snapshot()::text")[0]
        except ReconcileError:
            connection.close()
            raise
        self._coordinator, self._snapshot = connection, str(exported[0])
        self._blocking = BlockingWatch(self._database.location, self._name, self._database.name)
        if self._database.watermark:
            complete_up_to = min(complete_up_to, parse_moment(self._database.watermark))
        return SourceBoundary(
            database=self._database.name,
            taken_at=activity.now,
            watermark=complete_up_to,
            identity=f"{activity.name} {identifier}".strip(),
            snapshot=str(exported[1]),
            notes=notes,
        )

    def _system_identifier(self) -> str:
        with contextlib.closing(self._connect()) as connection:
            try:
                return str(self._latest(connection, _IDENTITY)[0])
            except UsageProblem:
                return ""

    def _latest(self, connection: Any, statement: str) -> tuple[Any, ...]:
        """The single row of a query about the present state. The query runs in a transaction of its own."""
        for opening in adbc.begin(adbc.LATEST, self._name):
            self._execute(connection, opening)
        row = self._rows(connection, statement)[0]
        self._execute(connection, "COMMIT")
        return row

    def close(self) -> None:
        adbc.close(self._coordinator)
        self._coordinator, self._snapshot = None, ""
        if self._blocking is not None:
            self._blocking.close()

    def gave_way(self) -> RunIncomplete | None:
        return None if self._blocking is None else self._blocking.gave_way

    def check(self, selection: TableSelection) -> None:
        if selection.is_optional:
            table = sql.text(self.table_of(selection))
            [(may_read,)] = self.query(f"SELECT coalesce(has_table_privilege(to_regclass({table}), 'SELECT'), false)")
            if not may_read:
                raise TableMissing(f"database {self._database.name!r} has no readable table {selection.table!r}.")
        types = self.column_types(selection)
        for column in selection.columns:
            self._check_comparable(selection.table, column, types)
        where = sql.where([*sql.conditions(selection, None), "false"])
        items = ", ".join(sql.column(column) for column in selection.columns)
        self.query(f"SELECT {items} FROM {self.table_of(selection)}{where}", about=f"table {selection.table!r}")

    def _check_comparable(self, table: str, column: Column, types: dict[str, str]) -> None:
        actual = types.get(column.expression)
        if column.compared_as is None or actual is None or actual in _COMPARABLE[column.compared_as]:
            return
        raise UsageProblem(
            f"{table}.{column.expression} has type {actual}, which cannot be compared as {column.compared_as.value}: "
            f"give the field another type, or write an expression that casts the column."
        )

    def is_empty(self, selection: TableSelection, since: datetime | None = None) -> bool:
        where = sql.where(sql.conditions(selection, since))
        return not self.query(f"SELECT 1 FROM {self.table_of(selection)}{where} LIMIT 1")

    def read(
        self, selections: Sequence[TableSelection], since: datetime | None, until: datetime | None = None
    ) -> DataFrame:
        queries = []
        for selection in selections:
            terms = sql.conditions(selection, since, until)
            pieces = self._spans(selection, terms, since) if selection.span else self._pages(selection, terms, since)
            queries += [sql.select(selection, self.table_of(selection), [*terms, *piece]) for piece in pieces]
        return self._frame(selections[0], queries)

    def repeated(self, selection: TableSelection, since: datetime) -> DataFrame | None:
        if self.is_unique(selection):
            return None
        key, where = sql.expression(selection.key), sql.where(sql.conditions(selection, since))
        newer = f"{key} IN (SELECT {key} FROM {self.table_of(selection)}{where})"
        terms = [*sql.conditions(selection, None, since), newer]
        return self._frame(selection, [sql.select(selection, self.table_of(selection), terms)])

    def is_unique(self, selection: TableSelection) -> bool:
        """Whether a unique index excludes two rows with one key."""
        if not sql.is_column(selection.key):
            return False
        table, column = sql.text(self.table_of(selection)), sql.text(selection.key)
        return bool(self.attempt(_UNIQUE.format(table=table, column=column), about="the indexes"))

    def read_keys(self, wanted: Sequence[tuple[TableSelection, Sequence[str]]]) -> DataFrame:
        queries = []
        for selection, keys in wanted:
            fixed = sql.conditions(selection, None)
            column_type = self.column_types(selection).get(selection.key)
            # A view that is split by id has no index on the key, so one query reads all keys.
            size = max(1, len(keys)) if selection.span else KEYS_PER_PARTITION
            for start in range(0, max(1, len(keys)), size):
                condition = sql.keys_condition(selection.key, column_type, keys[start : start + size])
                queries.append(sql.select(selection, self.table_of(selection), [*fixed, condition]))
        return self._frame(wanted[0][0], queries)

    def check_finite(self, selection: TableSelection, since: datetime | None) -> None:
        """Raise UsageProblem if a row's time is infinite."""
        time = f"{sql.expression(selection.time or '')}::timestamptz"
        # The check is a query of its own, because PostgreSQL can answer this query at once if the time has an index.
        where = sql.where([*sql.conditions(selection, since), f"{time} IN ('infinity', '-infinity')"])
        counted = f"SELECT count(*), min({sql.expression(selection.key)}::text) FROM {self.table_of(selection)}{where}"
        count, example = self.query(counted)[0]
        if count:
            raise UsageProblem(
                f"{selection.table}.{selection.time} is infinite in {count} rows, for example in the row with key "
                f"{example!r}: a row with an infinite time is never old enough to be judged. Correct these rows, or "
                f"exclude them by the rule's when."
            )

    def horizon(self, topic: str) -> datetime | None:
        view = sql.table_name("topic_v1", self._database.schema)
        rows = self.query(
            f"SELECT pruned_at - retention_seconds * interval '1 s' FROM {view} WHERE topic = {sql.text(topic)}",
            about="the broker's view topic_v1",
        )
        if not rows:
            raise UsageProblem(
                f"database {self._database.name!r} has no topic {topic!r}: correct the rule's topic, or the connection "
                f"(is it the broker's database, and the right schema?)."
            )
        return rows[0][0] if rows[0][0] is None else rows[0][0].astimezone(UTC)

    def query(self, statement: str, *, about: str = "the database") -> list[tuple[Any, ...]]:
        """The rows of a small query, inside the snapshot."""
        if self._coordinator is None:
            raise RunIncomplete(f"database {self._database.name!r} was read before its snapshot was taken.")
        return self._rows(self._coordinator, statement, about=about)

    def attempt(self, statement: str, *, about: str) -> list[tuple[Any, ...]]:
        """Like `query`, for a statement that may fail. After an error, the transaction of the snapshot continues."""
        self.query("SAVEPOINT attempt")
        try:
            return self.query(statement, about=about)
        except ReconcileError:
            self._execute(self._coordinator, "ROLLBACK TO SAVEPOINT attempt")
            raise

    def _frame(self, selection: TableSelection, queries: list[str]) -> DataFrame:
        self._spark.dataSource.register(adbc.PostgresDataSource)
        return (
            self._spark.read.format(adbc.FORMAT)
            .schema(selection.schema)
            .option("url", self._database.location)
            .option("snapshot", self._snapshot)
            .option("name", self._name)
            .option("queries", json.dumps(queries))
            .load()
        )

    def _spans(self, selection: TableSelection, terms: list[str], since: datetime | None) -> list[list[str]]:
        span, table = sql.name(selection.span or ""), self.table_of(selection)
        if since is None:
            first, last = (
                self.query(f"SELECT (SELECT {span} FROM {table} ORDER BY 1 {order} LIMIT 1)")[0][0]
                for order in ("ASC", "DESC")
            )
        else:
            first, last = self.query(f"SELECT min({span}), max({span}) FROM {table}{sql.where(terms)}")[0]
        if first is None:
            return [["false"]]
        count = _task_count((last - first + 1) / ROWS_PER_PARTITION)
        edges = [first + (last - first + 1) * number // count for number in range(count + 1)]
        return [[f"{span} >= {low} AND {span} < {high}"] for low, high in pairwise(edges)]

    def _pages(self, selection: TableSelection, terms: list[str], since: datetime | None) -> list[list[str]]:
        """For each task its conditions: the tasks divide the pages of the table, and of each of its partitions."""
        [(pages, longest)] = self.query(_PAGES.format(table=sql.text(self.table_of(selection)))) or [(0, 0)]
        if pages <= PAGES_PER_TASK or (since is not None and self._uses_index(selection, terms)):
            return [[]]
        count = min(_task_count(pages / PAGES_PER_TASK), longest)
        edges = [longest * number // count for number in range(count)]
        pieces = [[f"ctid >= '({low},0)'::tid AND ctid < '({high},0)'::tid"] for low, high in pairwise(edges)]
        # The last task reads to the end of the table. Pages that were added after the snapshot have no rows of this
        # snapshot.
        return [*pieces, [f"ctid >= '({edges[-1]},0)'::tid"]]

    def _uses_index(self, selection: TableSelection, terms: list[str]) -> bool:
        """Whether an index finds the rows, or nearly all of them: PostgreSQL reads a small partition without index."""
        statement = f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {self.table_of(selection)}{sql.where(terms)}"
        with self._translating("the database"), self._coordinator.cursor() as cursor:
            # By default, the driver reads by COPY, but COPY does not accept EXPLAIN.
            cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
            cursor.execute(statement)
            nodes = [json.loads(cursor.fetchone()[0])[0]["Plan"]]
        for node in nodes:
            nodes += node.get("Plans", ())
        return bool(sum(node["Total Cost"] for node in nodes if "Seq Scan" in node["Node Type"]) < PAGES_PER_TASK)

    def column_types(self, selection: TableSelection) -> dict[str, str]:
        """The PostgreSQL type of each column of the selection's table."""
        table = self.table_of(selection)
        if table not in self._types:
            rows = self.query(_COLUMN_TYPES.format(table=sql.text(table)))
            self._types[table] = {str(row[0]): str(row[1]) for row in rows}
        return self._types[table]

    def table_of(self, selection: TableSelection) -> str:
        """The quoted name of the selection's table."""
        return sql.table_name(selection.table, self._database.schema if selection.in_broker else None)

    def _connect(self) -> Any:
        import adbc_driver_manager

        try:
            return adbc.connect(self._database.location)
        except adbc_driver_manager.Error as error:
            kind = UsageProblem if error.sqlstate in adbc.ACCESS_STATES else RunIncomplete
            raise kind(
                f"database {self._database.name!r} cannot be reached: {adbc.one_line(error)}. "
                f"Check the connection of the database in the rules file and the environment, and that the server runs."
            ) from error

    def _execute(self, connection: Any, statement: str) -> None:
        with self._translating("the database"), connection.cursor() as cursor:
            cursor.execute(statement)

    def _rows(self, connection: Any, statement: str, *, about: str = "the database") -> list[tuple[Any, ...]]:
        with self._translating(about), connection.cursor() as cursor:
            cursor.execute(statement)
            return [tuple(row) for row in cursor.fetchall()]

    @contextlib.contextmanager
    def _translating(self, about: str) -> Iterator[None]:
        from adbc_driver_manager import Error

        try:
            yield
        except Error as error:
            raise adbc.translated(self._database.name, error, about) from error


def _task_count(exact: float) -> int:
    """The number of tasks for a table that has `exact` times the size of one task."""
    return max(1, min(MAX_TASKS, int(exact) + 1))
