"""The first look: every key of the window, classified; only what is not OK is written down."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from ..comparison import classify, evidence, sides
from ..errors import ReconcileError, RunIncomplete
from ..rules.rule import Rule
from ..sources.adbc import FAILURE

SUSPECT_COLUMNS: Final = ("key", "group", "class", "flags", "at", "carry")
SUSPECT_SCHEMA: Final = "key string, group string, class string, flags array<string>, at timestamp, carry boolean"
_STACK: Final = re.compile(r"\s+(at |\.\.\. \d+ more)|Driver stacktrace|JVM stacktrace")
# What Spark says of a file that it cannot read, however often.
_DAMAGED: Final = ("FAILED_READ_FILE", "is not a Parquet file", "MALFORMED_")
Counts = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What the first look at a rule found. `counts`: subject ('' or a group) -> class -> keys.

    `span_seconds` lie between the oldest and the newest row; None without rows.
    """

    rows: int
    messages: int
    counts: Counts
    span_seconds: float | None = None


def scan(
    spark: SparkSession,
    rule: Rule,
    sources: sides.Sources,
    window: classify.Window,
    limits: sides.ReadLimits,
    target: str,
) -> ScanResult:
    """Classify every key of the window; write those that are not OK to `target` (Parquet)."""
    gathered = evidence.gather(sides.of_window(rule, sources, window, limits), rule, window.watermark)
    classified = classify.with_classes(gathered, rule, window)
    observation = Observation(f"scan {rule.name}")
    columns = {"": "holds", **{group.name: f"holds_{number}" for number, group in enumerate(rule.groups)}}
    # Few numbers: they are collected row by row. What is not OK is counted from what was written.
    judged = [F.count_if(F.col(column) != 0).alias(column) for column in columns.values()]
    sums = [F.sum("rows").alias("rows"), F.sum(F.col("committed") + F.col("undecided")).alias("messages")]
    sums.append((F.unix_micros(F.max("row_at")) - F.unix_micros(F.min("row_at"))).alias("span"))
    found = classify.subjects(classified.observe(observation, *sums, *judged), rule, window).select(*SUSPECT_COLUMNS)
    written = Observation(f"suspects {rule.name}")
    with readable_errors(f"reading the tables of rule {rule.name!r}"):
        found.observe(written, F.count(F.lit(1)).alias("count")).write.mode("overwrite").parquet(target)
        seen, rows = observation.get, []
        if written.get["count"]:
            rows = spark.read.schema(SUSPECT_SCHEMA).parquet(target).groupBy("group", "class").count().collect()
        check_parts(target, int(written.get["count"] or 0), sum(int(row["count"]) for row in rows))
    counts = _no_counts(rule)
    for row in rows:
        counts[row["group"]][row["class"]] = int(row["count"])
    for subject, column in columns.items():
        counts[subject]["OK"] = int(seen[column] or 0) - sum(counts[subject].values())
    span = None if seen["span"] is None else seen["span"] / 1_000_000
    return ScanResult(int(seen["rows"] or 0), int(seen["messages"] or 0), counts, span)


def nothing(rule: Rule) -> ScanResult:
    """Of a rule that checksums have shown to be equal: a plan of a scan's size costs seconds over empty tables too."""
    return ScanResult(0, 0, _no_counts(rule))


def _no_counts(rule: Rule) -> Counts:
    subjects = ["", *(group.name for group in rule.groups)]
    return {subject: {name.value: 0 for name in classify.CLASSES} for subject in subjects}


def put(frame: DataFrame, target: str) -> int:
    """Write Parquet; returns the number of rows, which is to be held against what can be read (`check_parts`)."""
    written = Observation()
    frame.observe(written, F.count(F.lit(1)).alias("count")).write.mode("overwrite").parquet(target)
    return int(written.get["count"] or 0)


def write(spark: SparkSession, frame: DataFrame, target: str, schema: str) -> int:
    """Write Parquet; returns the number of rows. Raises RunIncomplete when they cannot all be read back from here."""
    count = put(frame, target)
    check_parts(target, count, spark.read.schema(schema).parquet(target).count() if count else 0)
    return count


def check_parts(target: str, written: int, found: int) -> None:
    """A folder that is not the same for all executors and the driver would lose findings silently."""
    if found != written:
        raise RunIncomplete(
            f"{written} rows were written to {target}, {found} are there: the executors do not write where this "
            f"process reads. Give a place with --output that all of them share, as s3a:// or a network disk."
        )


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Spark's errors as RunIncomplete: the reason in one line instead of a JVM's stack."""
    try:
        yield
    except ReconcileError:
        raise
    except (PySparkException, OSError) as error:
        raise _incomplete(what, error) from error
    except Exception as error:
        # Py4JJavaError and grpc errors have no common public base.
        if type(error).__module__.split(".")[0] not in ("py4j", "grpc", "pyspark"):
            raise
        raise _incomplete(what, error) from error


def _incomplete(what: str, error: Exception) -> RunIncomplete:
    text = str(error)
    if FAILURE in text:
        reason = text.split(FAILURE, 1)[1].splitlines()[0].split(" SQLSTATE")[0].strip()
        if "snapshot" in reason:
            reason = f"the snapshot was lost in the middle ({reason}): the coordinating connection was cut"
    else:
        reason = causes(text)
    remedy = "Run it again."
    if any(sign in text for sign in _DAMAGED):
        remedy = "Running it again will not help: correct or export the file that is named again."
    return RunIncomplete(
        f"{what} failed: {reason}. Nothing was published; the previous result stays in force. {remedy}"
    )


def causes(text: str) -> str:
    """An error of the JVM in one line: what it says and each of its causes, whole, without the stacks."""
    said: list[str] = []
    for line in text.splitlines():
        cause = line.strip().removeprefix("Caused by:").strip()
        if _STACK.match(line) or not cause or any(cause in earlier for earlier in said):
            continue
        said.append(cause)
    return "; ".join(said).rstrip(". ")
