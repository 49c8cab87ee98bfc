"""Reconcile from Python: in a notebook, in a task of Airflow or Databricks, or in a test.

import outbox_spark

result = outbox_spark.run(spark, "reconcile.toml", output="/Volumes/main/shop/reconcile")
result.findings.where("class = 'LOST'").show()
if result.exit_code:
    raise RuntimeError(f"{result.faults} findings: {result.report}")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .common.options import RunOptions, in_utc, parse_span
from .common.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COUNTS: Final = "rule string, `group` string, class string, subjects bigint"
_CAUSES: Final = (
    "id string, rule string, class string, `group` string, detail string, severity string, findings bigint, "
    "new bigint, acknowledged bigint, oldest string, subject string, meaning string, commands array<string>"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run has found. The frames can be read until a later run removes this run from the output folder."""

    exit_code: int
    """0 for a clean result, 1 for more findings than `fail_above` tolerates, as the exit code of the command."""
    faults: int
    """The number of findings that are not acknowledged."""
    findings: DataFrame
    """The findings, with the columns of the findings file."""
    causes: DataFrame
    """The causes of the findings, the most urgent first."""
    counts: DataFrame
    """The number of subjects per rule, group ('' for the messages) and class."""
    report: str
    """The path of the report, a page of HTML."""
    contents: Mapping[str, Any]
    """The contents of result.json."""


def run(
    spark: SparkSession,
    rules: str | Path,
    *,
    output: str = "reconcile",
    since: datetime | None = None,
    until: datetime | None = None,
    full: bool = False,
    look_back: str | None = None,
    metrics: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Reconcile once, as the command `outbox-reconcile run` does, and return what was found.

    spark: any session. Its settings are restored at the end. Do not use it in another thread meanwhile.
    rules: the path of the rules file.
    output: the folder or URI of the results, which executors and this process share.
    since, until: judge exactly the rows of this interval. Times without an offset are in UTC.
    full: judge all rows again, not only those since the last run.
    look_back: judge the rows of this time again, such as "7d".
    metrics: write a Prometheus textfile: its path, or its folder.
    quiet: print no progress on standard error.

    Raises ReconcileError if the run gives no result; its `exit_code` is 2 if an operator must correct something first,
    and 3 if the same run may succeed later. The previous result then stays in force.
    """
    # Without pyspark and pyarrow, other modules of this package can be imported.
    from . import pipeline
    from .common.store import Store
    from .output import summary
    from .stages.findings import FINDINGS_SCHEMA

    options = RunOptions(
        rules=Path(rules),
        output=output,
        since=None if since is None else in_utc(since),
        until=None if until is None else in_utc(until),
        full=full,
        look_back=None if look_back is None else parse_span(look_back),
        metrics=None if metrics is None else Path(metrics),
    )
    contents = pipeline.run(spark, options, Progress(quiet=quiet))
    store = Store(output)
    counted = [(rule["name"], group, name, count) for rule, group, name, count in summary.counts(contents)]
    return Result(
        exit_code=pipeline.exit_code(contents),
        faults=contents["faults"],
        findings=spark.read.schema(FINDINGS_SCHEMA).parquet(store.spark_path(contents["findings"])),
        causes=spark.createDataFrame(contents["causes"], _CAUSES),
        counts=spark.createDataFrame(counted, _COUNTS),
        report=f"{output.rstrip('/')}/{contents['report']}",
        contents=contents,
    )
