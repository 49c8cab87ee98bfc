"""A process with a PySpark that has Delta Lake and Iceberg: `python -m tests.spark.lake_process FOLDER JARS`.

FOLDER has exports as Parquet. The process writes them as tables of a lake, reconciles them in every form, and writes
what it saw to FOLDER/seen.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark import pipeline, session
from spark.common.errors import ReconcileError
from spark.common.options import RunOptions
from spark.rules.rule import DatabaseRule, SourceKind
from spark.sources.base import Column, TableSelection
from spark.sources.lake import LakeSource
from tests.spark.world import RULES

UNTIL = "2025-06-01T15:00:00+00:00"
ORDERS, MESSAGES = "orders_order", "message_v1"
SELECTION = TableSelection(table=ORDERS, columns=(Column("key", "id"),), key="id", time="paid_at")
SETTINGS = {
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
}


class Lake:
    """The tables of one lake in every form, and reconciliations over them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.delta, self.shop = folder / "delta", folder / "warehouse" / "shop"
        spark.sql("CREATE DATABASE IF NOT EXISTS shop")
        for name in (ORDERS, MESSAGES):
            frame = spark.read.parquet(str(folder / f"{name}.parquet"))
            # A column of nulls has no type in the export, and Iceberg takes none.
            untyped = [field.name for field in frame.schema if field.dataType.simpleString() == "void"]
            frame = frame.withColumns({column: F.lit(None).cast("string") for column in untyped})
            frame.write.format("delta").save(f"{self.delta}/{name}")
            frame.writeTo(f"lake.shop.{name}").using("iceberg").create()
            frame.writeTo(f"shop.{name}").using("delta").create()

    def rules(self, place: str) -> Path:
        """A rules file whose two databases are in `place`."""
        text = RULES.format(extra="", groups="")
        for name in ("APP", "BROKER"):
            text = text.replace(f'env = "RECONCILE_{name}"', f'{place}\nwatermark = "{UNTIL}"')
        path = self.folder / "lake.toml"
        path.write_text(text)
        return path

    def run(self, place: str, output: str) -> dict[str, Any]:
        """The result of a run over everything, shortened."""
        options = RunOptions(rules=self.rules(place), output=str(self.folder / output), full=True)
        result = pipeline.run(self.spark, options)
        snapshots = [each["snapshot"] for each in result["snapshots"]]
        counts = {name: count for name, count in result["totals"].items() if count}
        return {"totals": counts, "snapshots": snapshots}

    def refused(self, place: str, output: str) -> str:
        """The error of a run that must not begin."""
        try:
            self.run(place, output)
        except ReconcileError as error:
            return f"{error.exit_code}: {error}"
        return "was not refused"

    def pinned(self, kind: SourceKind, location: str, name: str) -> list[int]:
        """The rows of an open source before and after another job has added one, and of the source opened again."""
        source = LakeSource(self.spark, DatabaseRule(name="app", kind=kind, location=location, watermark=UNTIL))
        source.open([SELECTION])
        seen = [source.read([SELECTION], None).count()]
        self.spark.sql(f"INSERT INTO {name} SELECT * FROM {name} LIMIT 1")
        seen.append(source.read([SELECTION], None).count())
        source.close()
        source.open([SELECTION])
        seen.append(source.read([SELECTION], None).count())
        source.close()
        return seen


def every_form(lake: Lake) -> dict[str, Any]:
    """Two runs per form: the second after a correction of the row in the lake."""
    orders = {"delta": f"delta.`{lake.delta}/{ORDERS}`", "iceberg": f"lake.shop.{ORDERS}"}
    places = {"delta": f'kind = "delta"\npath = "{lake.delta}"', "iceberg": f'kind = "iceberg"\npath = "{lake.shop}"'}
    seen: dict[str, Any] = {}
    for kind, place in places.items():
        first = lake.run(place, f"of-{kind}")
        lake.spark.sql(f"UPDATE {orders[kind]} SET total = 12.50 WHERE id = 2")
        seen[kind] = {"first": first, "second": lake.run(place, f"of-{kind}")}
    seen["catalog"] = {"first": lake.run('kind = "catalog"\nnamespace = "shop"', "of-catalog")}
    return seen


def refusals(lake: Lake) -> dict[str, str]:
    """Each must name what is wrong and what to do."""
    return {
        "delta as parquet": lake.refused(f'kind = "parquet"\npath = "{lake.delta}"', "no"),
        "iceberg as parquet": lake.refused(f'kind = "parquet"\npath = "{lake.shop}"', "no"),
        "missing": lake.refused(f'kind = "delta"\npath = "{lake.delta}/nowhere"', "no"),
        "no catalog": lake.refused('kind = "catalog"\nnamespace = "nowhere.shop"', "no"),
    }


def view(lake: Lake) -> list[str]:
    """The notes of a source whose table is a view, which has no versions."""
    lake.spark.sql(f"CREATE VIEW shop.recent AS SELECT * FROM shop.{ORDERS}")
    source = LakeSource(lake.spark, DatabaseRule(name="app", kind=SourceKind.CATALOG, location="shop", watermark=UNTIL))
    try:
        return source.open([replace(SELECTION, table="recent")]).notes
    finally:
        source.close()


def without_files(lake: Lake) -> str:
    """The error of a run that loses the files of a table."""
    for path in (lake.delta / ORDERS).rglob("*.parquet"):
        path.unlink()
    return lake.refused(f'kind = "delta"\npath = "{lake.delta}"', "no")


def main() -> None:
    folder, jars = Path(sys.argv[1]), sys.argv[2]
    places = {
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
        "spark.sql.catalog.lake.warehouse": str(folder / "warehouse"),
        "spark.jars": jars,
    }
    spark = session.start("local[1]", {**SETTINGS, **places})
    lake = Lake(spark, folder)
    seen: dict[str, Any] = {"refusals": refusals(lake)}
    seen["forms"] = every_form(lake)
    seen["pinned"] = {
        "delta": lake.pinned(SourceKind.DELTA, str(lake.delta), f"delta.`{lake.delta}/{ORDERS}`"),
        "iceberg": lake.pinned(SourceKind.ICEBERG, str(lake.shop), f"lake.shop.{ORDERS}"),
        "catalog": lake.pinned(SourceKind.CATALOG, "shop", f"shop.{ORDERS}"),
    }
    seen["view"] = view(lake)
    seen["without files"] = without_files(lake)
    (folder / "seen.json").write_text(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    main()
