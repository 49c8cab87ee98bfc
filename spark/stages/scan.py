"""The third stage, the first look: classifies every key of the window, and writes the subjects that are not OK."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

from ..common.errors import RunIncomplete, readable_errors
from ..judging import classify, evidence
from ..rules.rule import CLASSES, FindingClass, Rule
from ..sources import contract
from ..sources.databases import Sources
from . import sides
from .checksums import ComparedChecksums
from .job import Job, check_parts, columns_of, put
from .prepare import PreparedRule

SUSPECT_SCHEMA: Final = "key string, group string, class string, flags array<string>, at timestamp, carry boolean"
Counts = dict[str, dict[str, int]]
"""The number of keys, first by subject ('' for the message, or the name of a group), then by class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedRule:
    """The result of the first look at a rule. `suspects` is the table of the subjects that are not OK."""

    prepared: PreparedRule
    checksums: ComparedChecksums
    suspects: str
    counts: Counts
    rows: int = 0
    messages: int = 0

    def saw(self, *classes: FindingClass) -> bool:
        """Whether the first look gave a subject one of these classes."""
        return any(counts[name.value] for counts in self.counts.values() for name in classes)


def scan(
    spark: SparkSession, prepared: PreparedRule, checksums: ComparedChecksums, job: Job, sources: Sources
) -> ScannedRule:
    """Classify every key of the window, except the keys in buckets whose checksums are equal. Raises RunIncomplete."""
    rule, name = prepared.rule, f"suspects/{job.number(prepared.rule)}"
    is_whole = prepared.window.since is None
    if is_whole:
        # A run over an empty table must not first read everything else.
        _check_not_empty(rule, sources, prepared.window.floor, (False, False))
    if checksums.limits.is_nothing:
        # Nothing is read, because Spark needs several seconds to plan a scan, even over empty tables.
        scanned = ScannedRule(
            prepared=prepared,
            checksums=checksums,
            suspects=job.write_empty(name, SUSPECT_SCHEMA),
            counts=_no_counts(rule),
        )
    else:
        scanned = _look(spark, prepared, checksums, sources, job.path(name))
    if not is_whole:
        seen = (checksums.skipped_rows + scanned.rows > 0, checksums.skipped_rows + scanned.messages > 0)
        _check_not_empty(rule, sources, prepared.window.floor, seen)
    return scanned


def _look(
    spark: SparkSession, prepared: PreparedRule, checksums: ComparedChecksums, sources: Sources, target: str
) -> ScannedRule:
    rule, window = prepared.rule, prepared.window
    gathered = evidence.gather(sides.of_window(prepared, checksums.limits, sources), rule, window.watermark)
    classified = classify.with_classes(gathered, rule, window)
    observation = Observation(f"scan {rule.name}")
    columns = {"": "holds", **{group.name: f"holds_{number}" for number, group in enumerate(rule.groups)}}
    # The observation has few aggregates, because Spark updates each aggregate row by row. Subjects that are not OK are
    # counted in the written table.
    judged = [F.count_if(F.col(column) != 0).alias(column) for column in columns.values()]
    sums = [F.sum("rows").alias("rows"), F.sum(F.col("committed") + F.col("undecided")).alias("messages")]
    found = classify.subjects(classified.observe(observation, *sums, *judged), rule, window).select(
        *columns_of(SUSPECT_SCHEMA)
    )
    with readable_errors(f"reading the tables of rule {rule.name!r}"):
        written = put(found, target)
        seen, rows = observation.get, []
        if written:
            rows = spark.read.schema(SUSPECT_SCHEMA).parquet(target).groupBy("group", "class").count().collect()
        check_parts(target, written, sum(int(row["count"]) for row in rows))
    counts = _no_counts(rule)
    for row in rows:
        counts[row["group"]][row["class"]] = int(row["count"])
    for subject, column in columns.items():
        counts[subject]["OK"] = int(seen[column] or 0) - sum(counts[subject].values())
    return ScannedRule(
        prepared=prepared,
        checksums=checksums,
        suspects=target,
        rows=int(seen["rows"] or 0),
        messages=int(seen["messages"] or 0),
        counts=counts,
    )


def _no_counts(rule: Rule) -> Counts:
    subjects = ["", *(group.name for group in rule.groups)]
    return {subject: {name.value: 0 for name in CLASSES} for subject in subjects}


def _check_not_empty(rule: Rule, sources: Sources, floor: datetime | None, seen: tuple[bool, bool]) -> None:
    """Raise RunIncomplete if the rule has no row or no message at all.

    `seen` tells whether the window had rows, and whether it had messages. If the window had no row or no message, the
    function looks for a row or a message at any time. The function accepts an empty topic if retention has removed
    messages and no row is newer than the `floor`.
    """
    if rule.allow_empty or all(seen):
        return
    (has_rows, has_messages), rows = seen, contract.rows(rule)
    with readable_errors(f"counting the rows of rule {rule.name!r}"):
        is_quiet = floor is not None and sources[rule.database].is_empty(rows, floor)
        if not has_rows and sources[rule.database].is_empty(rows):
            problem = f"no row of {rule.table!r} satisfies its condition"
        elif not has_messages and not is_quiet and sources.broker.is_empty(contract.messages(rule)):
            problem = f"the broker has no message of topic {rule.topic!r}"
        else:
            return
    raise RunIncomplete(
        f"rule {rule.name!r}: {problem}, so there is nothing to compare, and the run gives no result. Check the "
        f"connection and the rule. If the table or the topic may be empty, write allow_empty = true in the rule."
    )
