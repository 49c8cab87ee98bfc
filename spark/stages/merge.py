"""This run against the previous result: what is new, what is still open, what has recovered."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

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


def state_of(findings: DataFrame, pending: DataFrame) -> DataFrame:
    """What a run hands to the next: its findings (`class` set) and what was pending (`class` the finding it was)."""
    faults = findings.where(F.col("class").isin(_FAULTS)).select(*OPEN_COLUMNS)
    return faults.unionByName(pending.select(*OPEN_COLUMNS))


def nothing(spark: SparkSession) -> DataFrame:
    """The state before the first run."""
    return spark.createDataFrame([], OPEN_SCHEMA)


def findings(confirmed: DataFrame, earlier: DataFrame, pending: DataFrame, limits: DataFrame) -> DataFrame:
    """The findings of this run, and what became of each earlier finding that is none any more.

    `first_seen` is when a finding was first made, `was` the class it had in the previous result (null: it is new).

    `earlier` is the previous state, `pending` this run's, `limits` (rule, boundary, floor): the time new findings get,
    and the one before which nothing can be judged any more.
    """
    faults = confirmed.where(F.col("class").isin(_FAULTS)).drop("carry")
    known = earlier.where(F.col("class").isNotNull()).select(
        *SUBJECT, F.col("first_seen").alias("known_since"), F.col("class").alias("was")
    )
    dated = faults.join(known, SUBJECT, "left").join(F.broadcast(limits.drop("floor")), "rule")
    current = dated.withColumn("first_seen", F.coalesce("known_since", "boundary")).drop("known_since", "boundary")
    gone = earlier.join(current.select(*SUBJECT), SUBJECT, "left_anti")
    gone = gone.join(pending.select(*SUBJECT), SUBJECT, "left_anti").join(F.broadcast(limits), "rule")
    return current.unionByName(closed(gone), allowMissingColumns=True)


def in_order(findings: DataFrame) -> DataFrame:
    """The columns of the findings file."""
    return findings.select(*[column.split()[0].strip("`") for column in FINDINGS_SCHEMA.split(", ")])


def counts_apart(findings: DataFrame, earlier: DataFrame) -> tuple[int, int]:
    """How many findings are acknowledged, and how many of the others no earlier result had."""
    faults = findings.where(F.col("class").isin(_FAULTS))
    before = earlier.where(F.col("class").isNotNull()).select(*SUBJECT, F.lit(True).alias("before"))
    is_known = F.col("acknowledged").isNotNull()
    is_new = ~is_known & F.col("before").isNull()
    row = faults.join(before, SUBJECT, "left").agg(F.count_if(is_known), F.count_if(is_new)).collect()[0]
    return int(row[0]), int(row[1])


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
