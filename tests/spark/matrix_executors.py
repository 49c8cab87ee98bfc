"""A run of the matrix on two executors: `python -m tests.spark.matrix_executors FOLDER SOURCE`, a process of its own.

FOLDER has exports of the planted world. The process writes what the run found to FOLDER/seen.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spark import session
from tests.spark import matrix
from tests.spark.conftest import SETTINGS
from tests.spark.matrix import Cell

# More partitions than cores, so that keys, rows and messages meet only by shuffles between the executors.
CLUSTER = {**SETTINGS, "spark.sql.shuffle.partitions": "7", "spark.executor.memory": "900m"}


def main() -> None:
    folder, source = Path(sys.argv[1]), sys.argv[2]
    spark = session.start("local-cluster[2,1,1024]", CLUSTER)
    # Each executor has a folder of its own.
    homes = spark.sparkContext.parallelize(range(20), 20).map(lambda _: str(Path.cwd())).distinct().collect()
    assert len(homes) == 2, homes
    where = f'kind = "{source}"\npath = "{folder / "planted"}"'
    cell = Cell(
        spark=spark,
        folder=folder / "cell",
        place=lambda name, _: f'env = "RECONCILE_{name}"' if source == "postgres" else where,
        is_export=source != "postgres",
    )
    (folder / "seen.json").write_text(json.dumps(matrix.judged(cell, "batch", lambda: None)))
    spark.stop()


if __name__ == "__main__":
    main()
