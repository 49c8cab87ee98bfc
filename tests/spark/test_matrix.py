"""The matrix kind x way to run x source: every cell finds exactly what was planted. The table is in the documents."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from spark.archive import Archive
from spark.common.progress import Progress
from spark.rules import file as rules_file
from tests.spark import kinds, lake, matrix
from tests.spark.exports import export
from tests.spark.kinds import KINDS, Found
from tests.spark.matrix import MODES, Cell
from tests.spark.test_processes import ROOT
from tests.spark.world import World

pytestmark = pytest.mark.timeout(1800)
# The slow test runs one cell with all kinds.
QUICK = ("postgres", "batch")
CELLS = [
    pytest.param(source, mode, marks=[] if (source, mode) == QUICK else [pytest.mark.soak])
    for source in ("postgres", "parquet", "csv")
    for mode in MODES
]


@pytest.fixture
def seed() -> int:
    """A random seed; a failure shows it, and OUTBOX_MATRIX_SEED repeats it."""
    chosen = int(os.environ.get("OUTBOX_MATRIX_SEED") or random.Random().getrandbits(32))
    print(f"seed {chosen}")
    return chosen


@pytest.fixture
def urls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the rules name."""
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "mode"), CELLS)
def test_every_kind_is_found_and_nothing_else(
    spark_session: SparkSession, world: World, urls: None, tmp_path: Path, seed: int, source: str, mode: str
) -> None:
    is_export, is_archive = source != "postgres", mode == "archive"
    kinds.clean(world)
    planted: dict[str, list[Found]] = {}

    def place(name: str, is_planted: bool) -> str:
        if not is_export:
            return f'env = "RECONCILE_{name}"'
        if is_archive and name == "BROKER":
            return f'kind = "archive"\npath = "{tmp_path / "archive"}"'
        return f'kind = "{source}"\npath = "{tmp_path / ("planted" if is_planted else "clean")}"'

    def plant() -> None:
        planted.update(kinds.plant(world, seed))
        if is_archive:
            keep(spark_session, world, tmp_path)
        if is_export:
            export(world, source, tmp_path / "planted")

    if is_export:
        export(world, source, tmp_path / "clean")
    archive = tmp_path / "archive" if is_archive and not is_export else None
    cell = Cell(spark=spark_session, folder=tmp_path / "cell", place=place, is_export=is_export, archive=archive)
    matrix.check(matrix.judged(cell, mode, plant), planted)
    matrix.store(source, mode, seed)


@pytest.mark.soak
@pytest.mark.parametrize("source", ["postgres", "parquet"])
def test_every_kind_is_found_by_two_executors(world: World, urls: None, tmp_path: Path, seed: int, source: str) -> None:
    kinds.clean(world)
    planted = kinds.plant(world, seed)
    if source != "postgres":
        export(world, source, tmp_path / "planted")
    check_process("tests.spark.matrix_executors", str(tmp_path), source, folder=tmp_path, path=str(ROOT))
    seen = json.loads((tmp_path / "seen.json").read_text())
    matrix.check([[(key, group, name) for key, group, name in found] for found in seen], planted)


@pytest.mark.soak
def test_every_kind_is_found_with_checksums(
    spark_session: SparkSession, world: World, urls: None, tmp_path: Path, seed: int
) -> None:
    """First the kinds whose checksums SQL can compute, beside buckets that are not read. Then the others too."""
    kinds.clean(world)
    cell = Cell(
        spark=spark_session,
        folder=tmp_path / "cell",
        place=lambda name, _: f'env = "RECONCILE_{name}"',
        is_export=False,
        extra='bucket = "1m"',
    )
    planted = kinds.plant(world, seed, lambda kind: kind.has_checksum)
    result = cell.once(full=True)
    assert result["rules"][0]["rows_equal_by_checksum"] > len(KINDS) / 2, result["rules"][0]["notes"]
    matrix.check([cell.found(result)], planted)
    planted |= kinds.plant(world, seed, lambda kind: not kind.has_checksum)
    matrix.check([cell.found(cell.once(full=True))], planted)


def check_process(module: str, *arguments: str, folder: Path, path: str) -> None:
    """Run a module in a process of its own. Raises AssertionError with its last lines unless it succeeds."""
    environment = {**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith(("\tat ", "\t\tat "))]
    assert done.returncode == 0, "\n".join(said)[-3000:]


def keep(spark: SparkSession, world: World, folder: Path) -> None:
    """Archive the log. Then retention removes what all groups are past."""
    world.consume_all()
    cell = Cell(
        spark=spark,
        folder=folder / "archiving",
        place=lambda name, _: f'env = "RECONCILE_{name}"',
        is_export=False,
        archive=folder / "archive",
    )
    rules = rules_file.load(cell.path(planted=True, watermark=None))
    Archive(spark, rules, Progress(io.StringIO())).run()
    assert retention.run_once(Executor(world.broker, "outbox")).messages > len(KINDS)


@pytest.mark.soak
@pytest.mark.lake
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_is_found_in_delta_and_iceberg(
    spark_session: SparkSession, world: World, urls: None, tmp_path: Path, seed: int, mode: str
) -> None:
    """Both formats in one process, which has the PySpark that both support."""
    kinds.clean(world)
    export(world, "parquet", tmp_path / "clean")
    planted = kinds.plant(world, seed)
    export(world, "parquet", tmp_path / "planted")
    if mode == "archive":
        keep(spark_session, world, tmp_path)
    path = os.pathsep.join((lake.python_path(), str(ROOT)))
    check_process("tests.spark.matrix_lake", str(tmp_path), lake.jars(), mode, folder=tmp_path, path=path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    for source in ("delta", "iceberg"):
        matrix.check([[(key, group, name) for key, group, name in found] for found in seen[source]], planted)
        matrix.store(source, mode, seed)


def test_the_page_lists_every_kind_and_each_cell_has_all_of_them() -> None:
    faults = [kind.name for kind in KINDS if not kind.is_harmless]
    assert len(faults) >= 60 and len({kind.name for kind in KINDS}) == len(KINDS)
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert [kind.name for kind in KINDS if f"\n| {matrix.shown(kind.name)} | " not in page] == []
    cells = page.count("(seed ")
    assert cells >= len(MODES), "every way to run, at least from PostgreSQL"
    assert page.count(f"{len(faults)} of {len(faults)} (seed ") == cells
