"""The Python Data Source: one SQL query per partition, read over ADBC as Arrow, inside an exported snapshot.

Its code runs on executors: it needs only pyspark, pyarrow and the ADBC driver there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..safe_text import mask_passwords

FORMAT: Final = "outbox_postgres"
FAILURE: Final = "outbox-reconcile read failed:"
_BATCH_BYTES: Final = 4 * 1024 * 1024
_ARROW_TYPES: Final = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
}
TEXT_FORMS: Final = ("datestyle = 'ISO'", "bytea_output = 'hex'", "extra_float_digits = 1")
_PREPARE: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    "SET LOCAL TIME ZONE 'UTC'",
    # Values travel as texts: in one form, whatever the database's settings.
    *(f"SET LOCAL {setting}" for setting in TEXT_FORMS),
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL work_mem = '128MB'",
    # Decisions lie in the order of their messages: looking them up by index beats scanning all of them per partition.
    "SET LOCAL random_page_cost = 1.1",
)


@dataclass
class QueryPartition(InputPartition):
    """One query of one executor task."""

    query: str


class PostgresDataSource(DataSource):
    """`spark.read.format("outbox_postgres").schema(…).option("url", …).option("queries", JSON list)`.

    `url` is a libpq connection string (Spark redacts the option's value); `snapshot` is the name of an exported
    snapshot, whose exporting transaction the caller holds open.
    """

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        """See DataSource."""
        return PostgresReader(self.options, schema)


class PostgresReader(DataSourceReader):
    """Plans one partition per query and reads each in a connection of its own."""

    def __init__(self, options: Any, schema: StructType) -> None:
        self._url: str = options["url"]
        self._snapshot: str = options.get("snapshot", "")
        self._queries: list[str] = json.loads(options["queries"])
        self._schema = pa.schema(
            [pa.field(field.name, _ARROW_TYPES[field.dataType.simpleString()], True) for field in schema.fields]
        )

    def partitions(self) -> Sequence[InputPartition]:
        """See DataSourceReader."""
        return [QueryPartition(query) for query in self._queries]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceReader. A failure is a RuntimeError whose text starts with FAILURE, for the driver to find."""
        assert isinstance(partition, QueryPartition)
        import adbc_driver_manager

        try:
            yield from self._batches(partition.query)
        except adbc_driver_manager.Error as error:
            raise RuntimeError(f"{FAILURE} {one_line(error)}") from None

    def _batches(self, query: str) -> Iterator[pa.RecordBatch]:
        with connect(self._url) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
            for number, statement in enumerate(_PREPARE):
                cursor.execute(statement)
                if number == 0 and self._snapshot:
                    cursor.execute(f"SET TRANSACTION SNAPSHOT '{self._snapshot}'")
            cursor.execute(query)
            with cursor.fetch_record_batch() as reader:
                for batch in reader:
                    yield conform(batch, self._schema)
            cursor.execute("COMMIT")


def connect(url: str) -> Any:
    """A connection in autocommit mode, named so that runs do not wait for each other's snapshots."""
    import adbc_driver_postgresql.dbapi

    connection = adbc_driver_postgresql.dbapi.connect(url, autocommit=True)
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute("SET application_name = 'outbox-reconcile'")
    return connection


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly the declared types: Spark refuses any other, nullability included."""
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def one_line(error: BaseException) -> str:
    """A driver's error in one line, without the query it repeats."""
    text = " ".join(mask_passwords(str(error).split("Query was:")[0]).split())
    return re.sub(r"^.*?\bERROR: *", "", re.sub(r" LINE \d+: .*$", "", text)).rstrip(". ")
