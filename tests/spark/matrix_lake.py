"""The cells of Delta Lake and Iceberg in a process of their own: `python -m tests.spark.matrix_lake FOLDER JARS MODE`.

FOLDER has exports of the clean and of the planted world as Parquet, and an archive. The process writes what the runs of
each source found to FOLDER/seen.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark import session
from tests.spark import matrix
from tests.spark.exports import TABLES
from tests.spark.kinds import Found
from tests.spark.lake_process import SETTINGS
from tests.spark.matrix import Cell

TABLES_OF_LAKE = (*TABLES, "message_v1", "dead_letter_v1", "timed_out_v1", "delivery_v1")


def fill(spark: SparkSession, folder: Path) -> None:
    """The exports as tables of both formats."""
    for state in ("clean", "planted"):
        for name in TABLES_OF_LAKE:
            frame = spark.read.parquet(str(folder / state / f"{name}.parquet"))
            # A column of nulls has no type in the export, and Iceberg takes none.
            untyped = [field.name for field in frame.schema if field.dataType.simpleString() == "void"]
            frame = frame.withColumns({column: F.lit(None).cast("string") for column in untyped})
            frame.write.format("delta").save(str(folder / "delta" / state / name))
            frame.writeTo(f"lake.{state}.{name}").using("iceberg").create()


def main() -> None:
    folder, jars, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    places = {
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
        "spark.sql.catalog.lake.warehouse": str(folder / "warehouse"),
        "spark.jars": jars,
    }
    spark = session.start("local[2]", {**SETTINGS, **places})
    fill(spark, folder)
    seen: dict[str, list[list[Found]]] = {}
    for source, place in (("delta", folder / "delta"), ("iceberg", folder / "warehouse")):

        def of(name: str, is_planted: bool, source: str = source, place: Path = place) -> str:
            if mode == "archive" and name == "BROKER":
                return f'kind = "archive"\npath = "{folder / "archive"}"'
            return f'kind = "{source}"\npath = "{place / ("planted" if is_planted else "clean")}"'

        cell = Cell(spark=spark, folder=folder / f"cell of {source}", place=of, is_export=True)
        seen[source] = matrix.judged(cell, mode, lambda: None)
    (folder / "seen.json").write_text(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    main()
