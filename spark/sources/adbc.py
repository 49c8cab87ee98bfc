"""A Python Data Source for Spark, whose partitions are one SQL query each. All queries are read over ADBC, as Arrow, in
one snapshot.

This code runs on executors, on which only pyspark, pyarrow and the ADBC driver must be installed. See decision 040.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..common.errors import FAILURE, ReconcileError, RunIncomplete, UsageProblem
from ..common.safe_text import mask_passwords

FORMAT: Final = "outbox_postgres"
# The number of characters of a query that an error text shows. The first characters of a query name the table and the
# part of the table that was read; the rest of the query contains keys.
_SHOWN_QUERY: Final = 240
_BATCH_BYTES: Final = 4 * 1024 * 1024
# By the name of the type in Spark's DDL.
ARROW_TYPES: Final = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.field("element", pa.string())),
}
NAME: Final = "outbox-reconcile"
# Every transaction of this package holds an advisory lock of this class, so that the database shows which transactions
# are from this package. The application_name would not show these transactions: a pool may give a connection with this
# name to another client. A transaction releases the lock at its end.
LOCK_CLASS: Final = 1_869_967_960
SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
LATEST: Final = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
# Each transaction makes these settings with SET LOCAL. Behind a pool, a setting of the session would also apply to
# other clients, and might not apply to the next transaction of this package.
_SETTINGS: Final = (
    # Queries contain keys as constants. With other values of the next two settings, a constant would mean another key.
    "client_encoding = 'UTF8'",
    "standard_conforming_strings = on",
    # A query must fail if policies hide rows from the role, because the hidden rows would become false findings.
    "row_security = off",
    # The database sends values as texts, whose form must not depend on its own settings.
    "timezone = 'UTC'",
    "datestyle = 'ISO'",
    "bytea_output = 'hex'",
    "extra_float_digits = 1",
    "statement_timeout = 0",
    "idle_in_transaction_session_timeout = 0",
)
# A run that waits for a lock gives up: another session may wait for the run's snapshot (module `blocking`).
LOCK_SECONDS: Final = 5
_LOCK_TIMEOUT: Final = "55P03"
READING: Final = (
    "work_mem = '128MB'",
    # Decisions are stored in the order of their messages, so an index is faster than a scan for every partition.
    "random_page_cost = 1.1",
)
_USAGE_STATES: Final = {
    "42P01": "the table is not there",
    "3F000": "the schema is not there",
    "42703": "a column is not there",
    "42501": "the reader may not read it, or not all its rows (GRANT SELECT; BYPASSRLS against row-level security)",
    "42601": "an expression of the rule is not valid SQL",
    "42883": "an expression of the rule compares types that cannot be compared",
    "42804": "an expression of the rule has the wrong type",
    "42846": "a column cannot be cast to the type that is compared",
    "22P02": "an expression of the rule has a constant of the wrong type",
}
# Classes of SQLSTATE: data exception, syntax error or access rule violation, feature not supported.
_USAGE_CLASSES: Final = ("22", "42", "0A")
ACCESS_STATES: Final = ("28P01", "28000", "3D000")


class PostgresDataSource(DataSource):
    """`spark.read.format("outbox_postgres").schema(…).option("url", …).option("queries", JSON list)`.

    `url` is a libpq connection string; Spark hides the value of this option in its logs. `snapshot` is the name of an
    exported snapshot, whose transaction the caller must keep open. `name` is the application_name of the sessions.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        return PostgresReader(self.options, schema)


class PostgresReader(DataSourceReader):
    """Plans one partition per query, and reads each partition over a connection of its own."""

    def __init__(self, options: Any, schema: StructType) -> None:
        self._url: str = options["url"]
        self._snapshot: str = options.get("snapshot", "")
        self._name: str = options.get("name", NAME)
        self._queries: list[str] = json.loads(options["queries"])
        fields = [(field.name, ARROW_TYPES[field.dataType.simpleString()]) for field in schema.fields]
        self._schema = pa.schema(fields)

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(query) for query in self._queries]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raises RuntimeError with a text that starts with FAILURE, so that the driver recognises the error."""
        import adbc_driver_manager

        try:
            yield from self._batches(partition.value)
        except adbc_driver_manager.Error as error:
            read = partition.value.partition(" FROM ")[2][:_SHOWN_QUERY]
            raise RuntimeError(f"{FAILURE} {reason(error)} (reading {read})") from None

    def _batches(self, query: str) -> Iterator[pa.RecordBatch]:
        with connect(self._url) as connection, connection.cursor() as cursor:
            for statement in begin(SNAPSHOT, self._name, snapshot=self._snapshot, settings=READING):
                cursor.execute(statement)
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
            cursor.execute(query)
            with cursor.fetch_record_batch() as reader:
                for batch in reader:
                    # Spark refuses a batch with other types, or with another nullability.
                    yield batch.cast(self._schema)
            cursor.execute("COMMIT")


def connect(url: str) -> Any:
    """A connection in autocommit mode. Callers read in transactions that they start with the statements of `begin`."""
    import adbc_driver_postgresql.dbapi

    return adbc_driver_postgresql.dbapi.connect(url, autocommit=True)


def close(connection: Any) -> None:
    """Close a connection, if there is one; a connection that was lost is no error."""
    import adbc_driver_manager

    if connection is not None:
        with contextlib.suppress(adbc_driver_manager.Error):
            connection.close()


def begin(mode: str, name: str, *, snapshot: str = "", settings: Sequence[str] = ()) -> list[str]:
    """The statements that start a transaction of this package.

    `mode` is SNAPSHOT or LATEST, `name` is the application_name, and `snapshot` the name of an exported snapshot.
    """
    shown = name[:63].replace("'", "")
    return [
        mode,
        *([f"SET TRANSACTION SNAPSHOT '{snapshot}'"] if snapshot else []),
        f"SET LOCAL application_name = '{shown}'",
        f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'",
        *(f"SET LOCAL {setting}" for setting in (*_SETTINGS, *settings)),
        f"SELECT pg_advisory_xact_lock_shared({LOCK_CLASS}, {lock_of(name)})",
    ]


def lock_of(name: str) -> int:
    """The second number of the advisory lock of all transactions with this application_name."""
    return crc32(name.encode()) >> 1


def one_line(error: BaseException) -> str:
    """The text of a driver's error in one line, without the query."""
    text = " ".join(mask_passwords(str(error).split("Query was:")[0]).split())
    return re.sub(r"^.*?\bERROR: *", "", re.sub(r" LINE \d+: .*$", "", text)).rstrip(". ")


def reason(error: Any) -> str:
    """The reason of a driver's error, in one line."""
    if error.sqlstate == _LOCK_TIMEOUT:
        return (
            f"the run waited {LOCK_SECONDS} s for a lock, because another session changes the table, or waits to "
            f"change it ({one_line(error)})"
        )
    return one_line(error)


def translated(database: str, error: Any, about: str) -> ReconcileError:
    """The ReconcileError for a driver's error that occurred while reading `about`."""
    state = error.sqlstate or ""
    detail = f"{about} in database {database!r}: {reason(error)}"
    if state in _USAGE_STATES or state[:2] in _USAGE_CLASSES:
        problem = _USAGE_STATES.get(state, "the database does not accept an expression of the rule")
        return UsageProblem(f"{problem}: {detail}. Correct the rules file or the connection.")
    return RunIncomplete(f"reading failed, {detail}. Run the reconciliation again; the previous result stays in force.")
