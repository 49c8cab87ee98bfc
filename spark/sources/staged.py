"""Reading PostgreSQL in the process of the run (`read_on = "driver"`), for executors that cannot reach the database.

The process reads every query over its own connection, which holds the snapshot, so one connection of a pool is enough.
It writes the rows as Parquet below the folder of the run, and Spark reads these files. The next snapshot removes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from ..common.store import Store
from . import adbc


class Staging:
    """The folder into which the process of a run writes the rows that it has read from one database."""

    def __init__(self, store: Store, run: str, database: str) -> None:
        self._store, self._folder = store, f"runs/{run}/staged/{database}"
        self._numbers = itertools.count()

    def read(self, spark: SparkSession, connection: Any, queries: Sequence[str], schema: StructType) -> DataFrame:
        """The rows of the queries, which the connection executes in its open transaction. Raises the driver's error."""
        folder = f"{self._folder}/{next(self._numbers)}"
        self._store.make_folder(folder)
        columns = adbc.arrow_schema(schema)
        for number, query in enumerate(queries):
            with (
                self._store.output_stream(f"{folder}/part-{number}.parquet") as file,
                pq.ParquetWriter(file, columns) as writer,
                connection.cursor() as cursor,
            ):
                for batch in adbc.batches(cursor, query, columns):
                    writer.write_batch(batch)
        self._store.protect(folder)
        return spark.read.schema(schema).parquet(self._store.spark_path(folder))

    def clear(self) -> None:
        """Remove all rows that were read."""
        if self._store.folders(self._folder):
            self._store.remove(self._folder)
