"""One run: its options, its rules, and the tables that its stages write."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from ..common.errors import RunIncomplete
from ..common.options import RunOptions
from ..common.store import Store
from ..rules import file as rules_file
from ..rules.rule import Rule, Rules
from ..sources.adbc import ARROW_TYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: its options and rules, and its folder `runs/<name>` in the output folder."""

    options: RunOptions
    rules: Rules
    store: Store
    name: str
    started: datetime

    @classmethod
    def of(cls, options: RunOptions) -> Job:
        """A run that begins now. Raises UsageProblem if the rules or the output folder cannot be used."""
        started = datetime.now(UTC)
        rules = rules_file.load(options.rules)
        return cls(
            options=options,
            rules=rules,
            store=Store(options.output),
            name=f"{started:%Y%m%dT%H%M%S%fZ}-{uuid.uuid4().hex[:6]}",
            started=started,
        )

    @property
    def interval(self) -> list[str] | None:
        """Begin and end of the interval to judge; None if the run judges no interval."""
        since, until = self.options.since, self.options.until
        return [since.isoformat(), until.isoformat()] if since is not None and until is not None else None

    def number(self, rule: Rule) -> int:
        """The position of the rule in the rules file."""
        return [each.name for each in self.rules.rules].index(rule.name)

    def path(self, name: str) -> str:
        """The path at which Spark writes and reads the run's table `name`."""
        return self.store.spark_path(f"runs/{self.name}/{name}")

    def write_empty(self, name: str, schema: str) -> str:
        """Write the table `name` without rows, and return its path. The method does not use Spark."""
        fields = [pa.field(column, ARROW_TYPES[kind]) for column, kind in columns_of(schema).items()]
        self.store.write_table(f"runs/{self.name}/{name}/part-0.parquet", pa.schema(fields).empty_table())
        return self.path(name)


def columns_of(schema: str) -> dict[str, str]:
    """The type of each column of a table of a run, whose `schema` is written in Spark's DDL."""
    named = (column.split() for column in schema.split(", "))
    return {name.strip("`"): kind for name, kind in named}


def empty_frame(spark: SparkSession, schema: str) -> DataFrame:
    """A frame without rows. Its limit of 0 rows lets Spark's optimizer remove the joins with it."""
    return spark.createDataFrame([], schema).limit(0)


def put(frame: DataFrame, target: str) -> int:
    """Write Parquet files, and return the number of written rows. The caller must compare it with the number of rows
    that it reads back (`check_parts`)."""
    written = Observation()
    frame.observe(written, F.count(F.lit(1)).alias("count")).write.mode("overwrite").parquet(target)
    return int(written.get["count"] or 0)


def write(frame: DataFrame, target: str, schema: str) -> int:
    """Write Parquet files, and return the number of rows. Raises RunIncomplete if reading the files gives another
    number."""
    count = put(frame, target)
    read = frame.sparkSession.read.schema(schema)
    check_parts(target, count, read.parquet(target).count() if count else 0)
    return count


def check_parts(target: str, written: int, found: int) -> None:
    """Raise RunIncomplete if rows are missing, because executors have written them into a folder that this process
    cannot read."""
    if found != written:
        raise RunIncomplete(
            f"{written} rows were written to {target}, but this process finds {found} rows there: the executors write "
            f"into a folder that this process cannot read. Give a folder that the executors and this process share "
            f"with --output, such as s3a:// or a network disk."
        )
