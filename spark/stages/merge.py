"""This run against the previous result: what is new, what is still open, what has recovered."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from ..comparison import classify
from . import confirm

SUBJECT: Final = ["rule", "key", "group"]
OPEN_COLUMNS: Final = ("rule", "key", "group", "class", "first_seen", "at")
OPEN_SCHEMA: Final = "rule string, key string, group string, class string, first_seen timestamp, at timestamp"
FINDINGS_SCHEMA: Final = (
    confirm.SCHEMA.removesuffix("carry boolean")
    + "first_seen timestamp, was string, acknowledged string, remedy string"
)
_FAULTS: Final = [name.value for name in classify.FAULTS]


class RuleLimits(NamedTuple):
    """Of a rule: the time its new findings get, and the one before which nothing can be judged any more."""

    boundary: datetime
    floor: datetime | None


class FindingCounts(NamedTuple):
    """Findings of one rule, group ('' for the message), class and bucket of time (its start in seconds since 1970)."""

    rule: str
    group: str
    name: str
    bucket: int | None
    is_known: bool
    """Acknowledged."""
    is_new: bool
    """No earlier result had them, and they are not acknowledged."""
    findings: int


def state_of(findings: DataFrame, pending: DataFrame) -> DataFrame:
    """What a run hands to the next: its findings (`class` set) and what was pending (`class` the finding it was)."""
    faults = findings.where(F.col("class").isin(_FAULTS)).select(*OPEN_COLUMNS)
    return faults.unionByName(pending.select(*OPEN_COLUMNS))


def nothing(spark: SparkSession) -> DataFrame:
    """The state before the first run."""
    return empty(spark, OPEN_SCHEMA)


def empty(spark: SparkSession, schema: str) -> DataFrame:
    """No row. The limit tells Spark's optimizer, which then leaves out the joins with it."""
    return spark.createDataFrame([], schema).limit(0)


def empty_table(schema: str) -> pa.Table:
    """No row, for who writes it without Spark."""
    columns = StructType.fromDDL(schema)
    assert isinstance(columns, StructType)
    return to_arrow_schema(columns, timezone="UTC").empty_table()


def findings(
    confirmed: DataFrame, earlier: DataFrame, pending: DataFrame, limits: Mapping[str, RuleLimits]
) -> DataFrame:
    """The findings of this run, and what became of each earlier finding that is none any more.

    `first_seen` is when a finding was first made, `was` the class it had in the previous result (null: it is new).

    `earlier` is the previous state, `pending` this run's, `limits` are those of each rule.
    """
    faults = confirmed.where(F.col("class").isin(_FAULTS)).drop("carry")
    known = earlier.where(F.col("class").isNotNull()).select(
        *SUBJECT, F.col("first_seen").alias("known_since"), F.col("class").alias("was")
    )
    boundary = _by_rule({rule: each.boundary for rule, each in limits.items()})
    dated = faults.join(known, SUBJECT, "left").withColumn("first_seen", F.coalesce("known_since", boundary))
    current = dated.drop("known_since")
    gone = earlier.join(current.select(*SUBJECT), SUBJECT, "left_anti")
    gone = gone.join(pending.select(*SUBJECT), SUBJECT, "left_anti")
    floor = _by_rule({rule: each.floor for rule, each in limits.items()})
    return current.unionByName(closed(gone.withColumn("floor", floor)), allowMissingColumns=True)


def _by_rule(times: Mapping[str, datetime | None]) -> Column:
    """The time of a row's `rule`."""
    found = F.lit(None).cast("timestamp")
    for rule, time in times.items():
        found = F.when(F.col("rule") == rule, F.lit(time).cast("timestamp")).otherwise(found)
    return found


def in_order(findings: DataFrame) -> DataFrame:
    """The columns of the findings file."""
    return findings.select(*[column.split()[0].strip("`") for column in FINDINGS_SCHEMA.split(", ")])


def counted(findings: DataFrame, bucket_seconds: int) -> list[FindingCounts]:
    """The written findings, in one pass over them."""
    bucket = (F.floor(F.unix_seconds("at") / bucket_seconds) * bucket_seconds).cast("bigint")
    is_fault, is_known = F.col("class").isin(_FAULTS), F.col("acknowledged").isNotNull()
    is_new = ~is_known & F.col("was").isNull()
    columns = [bucket.alias("bucket"), (is_fault & is_known).alias("is_known"), (is_fault & is_new).alias("is_new")]
    return [FindingCounts(*row) for row in findings.groupBy("rule", "group", "class", *columns).count().collect()]


def judgeable(floor: Column) -> Column:
    """Whether something of an earlier run is not older than `floor` (null: there is none)."""
    return F.coalesce(F.col("at") >= floor, F.lit(True))


def closed(gone: DataFrame) -> DataFrame:
    """What was open and is neither a finding nor pending now (with `floor`): EXPIRED, or RECOVERED if it was one."""
    is_expired = ~judgeable(F.col("floor"))
    was = F.coalesce("class", F.lit(classify.FindingClass.PENDING.value))
    floor = F.date_format("floor", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    reason = F.concat(
        F.lit("was "), was, F.lit("; retention may have removed its evidence: nothing before "), floor,
        F.lit(" can be judged any more"),
    )  # fmt: skip
    name = F.when(is_expired, classify.FindingClass.EXPIRED.value).otherwise(classify.FindingClass.RECOVERED.value)
    return gone.where(is_expired | F.col("class").isNotNull()).select(
        *SUBJECT,
        name.alias("class"),
        F.when(is_expired, "warning").otherwise("info").alias("severity"),
        F.array_compact(F.array(F.col("class"))).alias("flags"),
        F.when(is_expired, reason)
        .otherwise(F.concat(F.lit("was "), was, F.lit(", is as declared now")))
        .alias("detail"),
        "at",
        "first_seen",
        F.col("class").alias("was"),
    )


def pending(scanned: DataFrame, confirmed: DataFrame, earlier: DataFrame) -> DataFrame:
    """Subjects that the next run must look at again, with the finding each was before, if any.

    An earlier finding beyond this run's boundary (which a changed rule or a full run may have moved back) stays open.
    """
    columns = [*SUBJECT, "at"]
    unjudged = confirmed.where("class = 'PENDING'").join(earlier.select(*SUBJECT), SUBJECT, "left_semi")
    waiting = scanned.where("carry").select(*columns).unionByName(confirmed.where("carry").select(*columns))
    unique = waiting.unionByName(unjudged.select(*columns)).groupBy(*SUBJECT).agg(F.min("at").alias("at"))
    current = confirmed.where(F.col("class").isin(_FAULTS)).select(*SUBJECT)
    known = earlier.select(*SUBJECT, "class", "first_seen")
    return unique.join(current, SUBJECT, "left_anti").join(known, SUBJECT, "left").select(*OPEN_COLUMNS)
