"""Tables of Delta Lake and Iceberg, by path or by their name in a catalog. A run reads one version of each table.

A job that writes such a table replaces rows while a run reads. So the source fixes the version of a table at the first
use of the table. Until `close`, every read of the table gets this version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from ..common.errors import ReconcileError, TableMissing, UsageProblem, causes
from ..rules.rule import DatabaseRule, SourceKind
from .base import SourceBoundary, TableSelection
from .files import FrameSource

DELTA: Final = "delta"
ICEBERG: Final = "iceberg"
# What Spark needs for a table format. `{spark}` is Spark's version with one dot, because each version has its own jar.
SETTINGS: Final = {
    DELTA: (
        "--conf spark.jars.packages=io.delta:delta-spark_{spark}_2.13:VERSION "
        "--conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension "
        "--conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
    ),
    ICEBERG: (
        "--conf spark.jars.packages=org.apache.iceberg:iceberg-spark-runtime-{spark}_2.13:VERSION "
        "--conf spark.sql.extensions=org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    ),
}
# Spark's names for errors about a table that does not exist.
_MISSING: Final = ("PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND", "DELTA_TABLE_NOT_FOUND", "SCHEMA_NOT_FOUND")
# Signs of a session without the jar, the extension or the catalog of a table format.
_NOT_CONFIGURED: Final = (
    "DATA_SOURCE_NOT_FOUND",
    "DELTA_CONFIGURE_SPARK_SESSION",
    "REQUIRES_SINGLE_PART_NAMESPACE",
    "CATALOG_NOT_FOUND",
    "Cannot find catalog plugin class",
)


class LakeSource(FrameSource):
    """Tables that have versions: `kind = "delta"` and `kind = "iceberg"` by path, `kind = "catalog"` by name."""

    def __init__(self, spark: SparkSession, database: DatabaseRule) -> None:
        super().__init__(spark, database)
        self._versions: dict[str, str] = {}
        self._notes: list[str] = []

    def open(self, timed: Sequence[TableSelection]) -> SourceBoundary:
        """The boundary names the version of each table with a time."""
        for selection in timed:
            self._table(selection)
        boundary = super().open(timed)
        versions = ", ".join(f"{table} {version}" for table, version in self._versions.items())
        return replace(boundary, snapshot=versions, notes=[*boundary.notes, *self._notes])

    def close(self) -> None:
        super().close()
        self._versions.clear()
        self._notes.clear()

    def table(self, selection: TableSelection) -> DataFrame:
        """Raises TableMissing, or UsageProblem if Spark lacks the table format or the catalog."""
        name = selection.table
        try:
            found = self._found(name)
            kind = self._format(name)
            if kind is None:
                self._notes.append(
                    f"{name!r} is neither a table of Delta Lake nor of Iceberg, so it has no versions. The run may "
                    f"read different states of it, and `grace` must be longer than the duration of the run"
                )
                return found
            version = self._version(name, kind)
            self._versions[name] = "empty" if version is None else f"version {version}"
            return found.limit(0) if version is None else self._found(name, version)
        except ReconcileError:
            raise
        except PySparkException as error:
            raise self._problem(name, error) from error
        except Exception as error:
            # Errors of a catalog plugin have no Spark error class: py4j and Spark Connect name them differently.
            if not any(sign in str(error) for sign in _NOT_CONFIGURED):
                raise
            raise self._problem(name, error) from error

    def _found(self, table: str, version: int | None = None) -> DataFrame:
        reader = self._spark.read if version is None else self._spark.read.option("versionAsOf", version)
        if self._database.kind is SourceKind.CATALOG:
            return reader.table(self._address(table))
        return reader.format(self._database.kind.value).load(self._address(table))

    def _address(self, table: str) -> str:
        """The path of the table, or its name in the catalog."""
        if self._database.kind is SourceKind.CATALOG:
            return f"{self._database.location}.{table}"
        return f"{self._database.location.rstrip('/')}/{table}"

    def _format(self, table: str) -> str | None:
        """The table format; None for a view, or for a table in a format without versions."""
        if self._database.kind is not SourceKind.CATALOG:
            return self._database.kind.value
        described = self._spark.sql(f"DESCRIBE TABLE EXTENDED {self._address(table)}").where("col_name = 'Provider'")
        rows = described.select("data_type").collect()
        # A table may have a column with the name `Provider`, and its row comes first.
        found = str(rows[-1][0]).lower() if rows else ""
        return found if found in SETTINGS else None

    def _version(self, table: str, kind: str) -> int | None:
        """The present version; None for an Iceberg table to which no job has written."""
        address, is_named = self._address(table), self._database.kind is SourceKind.CATALOG
        if kind == DELTA:
            name = address if is_named else f"delta.`{address.replace('`', '``')}`"
            return int(self._spark.sql(f"DESCRIBE HISTORY {name} LIMIT 1").collect()[0]["version"])
        by_path = self._spark.read.format(ICEBERG)
        refs = self._spark.table(f"{address}.refs") if is_named else by_path.load(f"{address}#refs")
        rows = refs.where("name = 'main'").select("snapshot_id").collect()
        return int(rows[0][0]) if rows else None

    def _problem(self, table: str, error: Exception) -> UsageProblem:
        text, address, kind = str(error), self._address(table), self._database.kind.value
        first_line = (text.strip().splitlines() or [""])[0].rstrip(". ")
        if any(sign in text for sign in _NOT_CONFIGURED):
            version = ".".join(self._spark.version.split(".")[:2])
            settings = [SETTINGS[kind]] if kind in SETTINGS else list(SETTINGS.values())
            return UsageProblem(
                f"{address} of {self._database.name!r} cannot be read, because this Spark does not have the table "
                f"format or the catalog: {first_line}. Give the settings of your format with --conf: "
                f"{'; or '.join(settings).format(spark=version)}."
            )
        if any(sign in text for sign in _MISSING):
            return TableMissing(
                f"table {table!r} of {self._database.name!r} is not there: {address} is no table of kind "
                f"{kind!r}. Correct the rules file, or create the table."
            )
        if isinstance(error, AnalysisException):
            return UsageProblem(f"{address} of {self._database.name!r} cannot be read: {first_line}")
        return UsageProblem(f"{address} of {self._database.name!r} cannot be read: {causes(text)[:400]}")
