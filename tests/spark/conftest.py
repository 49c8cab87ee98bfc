"""One Spark session for the folder: starting one takes longer than most tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from outbox.broker import embedded
from spark import pipeline, session
from spark.common.options import RunOptions
from spark.common.progress import Progress
from tests.databases import drop_databases, new_name
from tests.spark.world import SHOP, World, write_rules

# Small data, many plans: the time goes into compiling, not computing.
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m",
}


@pytest.fixture(scope="session")
def spark_session() -> Iterator[SparkSession]:
    """A local session with as few tasks as possible."""
    spark = session.start("local[2]", SETTINGS)
    yield spark
    spark.stop()
    _end_java()


def _end_java() -> None:
    """PySpark leaves its Java process to end with Python; a run of the tests leaves nothing running."""
    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    # It ends when its standard input does.
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


@pytest.fixture(scope="session")
def shop_template(server_url: str) -> Iterator[str]:
    """The name of a template database with the tables of a shop."""
    name = new_name()
    with psycopg.connect(embedded.create_database(server_url, name), autocommit=True) as connection:
        connection.execute(SHOP)
    yield name
    drop_databases(server_url, [name])


@pytest.fixture
def world(new_database: Callable[..., str], shop_template: str, broker_url: str) -> Iterator[World]:
    """A shop and a broker, empty."""
    made = World(new_database(template=shop_template), broker_url)
    yield made
    made.close()


@dataclass
class Reconciler:
    """Runs reconciliations of one world into one folder."""

    spark: SparkSession
    world: World
    folder: Path
    said: io.StringIO = field(default_factory=io.StringIO)
    output: str = "out"

    def rules(self, *, groups: Sequence[str] = (), extra: str = "", text: str | None = None) -> Path:
        """Each group makes all plans of a run larger: only tests that are about groups name some."""
        return write_rules(self.folder, groups=groups, extra=extra, text=text)

    def run(
        self,
        *,
        full: bool = False,
        since: datetime | None = None,
        until: datetime | None = None,
        rules: Path | None = None,
        metrics: Path | None = None,
        look_back: float | None = None,
    ) -> dict[str, Any]:
        path = rules or self.folder / "reconcile.toml"
        if not path.exists():
            self.rules()
        options = RunOptions(
            rules=path,
            output=str(self.folder / self.output),
            since=since,
            until=until,
            full=full,
            metrics=metrics,
            look_back=look_back,
        )
        return pipeline.run(self.spark, options, Progress(self.said))

    def findings(self, result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """(key, group, class) of a result's findings."""
        return [(row["key"], row["group"], row["class"]) for row in self.rows(result)]

    def rows(self, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The findings file, whole."""
        path = str(self.folder / self.output / result["findings"])
        return [row.asDict() for row in self.spark.read.parquet(path).collect()]


@pytest.fixture
def reconcile(spark_session: SparkSession, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    """Reconciliations of `world`."""
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    return Reconciler(spark_session, world, tmp_path)
