"""The findings of every run in one table of a catalog (`--output-table`).

The table must be a table of Delta Lake or Apache Iceberg: only these formats add all rows of a run in one commit. A run
adds its rows after its result is in force. If the run is killed in between, the next run adds these rows. The rows
contain the name of their run, so no run's rows are added twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from ..common.errors import RunIncomplete, UsageProblem, causes
from ..common.store import Store
from ..sources.lake import NOT_CONFIGURED, first_line, format_of, remedy
from ..stages.findings import FINDINGS_SCHEMA
from ..stages.job import columns_of

_SCHEMA: Final = f"run string, finished_at timestamp, {FINDINGS_SCHEMA}"


class FindingsTable:
    """The table `name`, to which each run adds its findings."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        """Raise UsageProblem if the table does not exist, if its commits are not atomic, or if it lacks a column."""
        self._spark, self._name = spark, name
        self._wanted = columns_of(_SCHEMA)
        try:
            found = {field.name: field.dataType.simpleString() for field in spark.table(name).schema.fields}
            kind = format_of(spark, name)
        except Exception as error:
            # Errors of a catalog plugin have no Spark error class.
            raise self._cannot_be_used(error) from error
        if kind is None:
            raise UsageProblem(
                f"{name} is neither a table of Delta Lake nor of Iceberg: a killed run would leave a part of its "
                f"findings in it. Give another table with --output-table; create it with: {self._ddl()}"
            )
        wrong = [f"{column} {kind}" for column, kind in self._wanted.items() if found.get(column) != kind]
        if wrong:
            raise UsageProblem(
                f"{name} does not have the columns of the findings: {', '.join(wrong)}. "
                f"ALTER TABLE {name} ADD COLUMNS ({', '.join(wrong)}), or give another table with --output-table."
            )
        self._others = {column: kind for column, kind in found.items() if column not in self._wanted}

    def add(self, store: Store, result: Mapping[str, Any]) -> int:
        """Add the findings of `result`, unless the table has rows of this run. Returns the number of added rows.

        Raises RunIncomplete if the table cannot be written. The next run with this table then adds the rows.
        """
        try:
            known = self._spark.table(self._name).where(F.col("run") == result["run"])
            if not known.isEmpty():
                return 0
            findings = self._spark.read.schema(FINDINGS_SCHEMA).parquet(store.spark_path(result["findings"]))
            count = findings.count()
            if count:
                finished = F.lit(datetime.fromisoformat(result["finished_at"])).cast("timestamp")
                head = [F.lit(result["run"]).alias("run"), finished.alias("finished_at")]
                rest = [F.lit(None).cast(kind).alias(column) for column, kind in self._others.items()]
                findings.select(*head, *findings.columns, *rest).writeTo(self._name).append()
            return count
        except Exception as error:
            raise RunIncomplete(
                f"the result of run {result['run']} is in force, but its findings could not be added to "
                f"{self._name}: {causes(str(error))[:400]}. The next run with --output-table {self._name} adds them."
            ) from error

    def make_up(self, store: Store, result: Mapping[str, Any] | None) -> None:
        """If the run of the result in force was killed before it added its rows to this table, add these rows now."""
        if result is not None and result.get("output_table") == self._name:
            self.add(store, result)

    def _cannot_be_used(self, error: Exception) -> UsageProblem:
        text = str(error)
        if any(sign in text for sign in NOT_CONFIGURED):
            return UsageProblem(
                f"the table {self._name!r} of --output-table cannot be used, because this Spark does not have its "
                f"catalog or its table format: {first_line(text)}. Give the settings of your format with --conf: "
                f"{remedy(self._spark, '')}"
            )
        if isinstance(error, PySparkException) and "TABLE_OR_VIEW_NOT_FOUND" in text:
            return UsageProblem(f"the table {self._name} of --output-table is not there. Create it with: {self._ddl()}")
        return UsageProblem(f"the table {self._name} of --output-table cannot be used: {first_line(text)}.")

    def _ddl(self) -> str:
        columns = ", ".join(f"`{column}` {kind}" for column, kind in self._wanted.items())
        return f"CREATE TABLE {self._name} ({columns}) USING delta (or: USING iceberg)"
