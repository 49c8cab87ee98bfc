"""This run against the previous result: what is new, what is still open, what has recovered."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from . import classify, confirm

SUBJECT: Final = ["rule", "key", "group"]
OPEN_COLUMNS: Final = ("rule", "key", "group", "class", "first_seen", "at")
OPEN_SCHEMA: Final = "rule string, key string, group string, class string, first_seen timestamp, at timestamp"
FINDINGS_SCHEMA: Final = confirm.SCHEMA.removesuffix("carry boolean") + "first_seen timestamp"
_FAULTS: Final = [name.value for name in classify.FAULTS]


def state_of(findings: DataFrame, pending: DataFrame) -> DataFrame:
    """What a run hands to the next: its findings (`class` set) and what was pending (`class` the finding it was)."""
    faults = findings.where(F.col("class").isin(_FAULTS)).select(*OPEN_COLUMNS)
    return faults.unionByName(pending.select(*OPEN_COLUMNS))


def nothing(spark: SparkSession) -> DataFrame:
    """The state before the first run."""
    return spark.createDataFrame([], OPEN_SCHEMA)


def findings(confirmed: DataFrame, earlier: DataFrame, pending: DataFrame, first_seen: DataFrame) -> DataFrame:
    """The findings of this run with `first_seen`, and RECOVERED for each earlier finding that is none any more.

    `earlier` is the previous state, `pending` this run's, `first_seen` (rule, boundary) the time new ones get.
    """
    faults = confirmed.where(F.col("class").isin(_FAULTS)).drop("carry")
    known = earlier.where(F.col("class").isNotNull()).select(*SUBJECT, F.col("first_seen").alias("known_since"))
    dated = faults.join(known, SUBJECT, "left").join(F.broadcast(first_seen), "rule")
    current = dated.withColumn("first_seen", F.coalesce("known_since", "boundary")).drop("known_since", "boundary")
    everything = current.unionByName(recovered(earlier, current, pending), allowMissingColumns=True)
    return everything.select(*[column.split()[0].strip("`") for column in FINDINGS_SCHEMA.split(", ")])


def recovered(earlier: DataFrame, current: DataFrame, pending: DataFrame) -> DataFrame:
    """Earlier findings that are neither findings nor pending now."""
    was = earlier.where(F.col("class").isNotNull())
    gone = was.join(current.select(*SUBJECT), SUBJECT, "left_anti").join(pending.select(*SUBJECT), SUBJECT, "left_anti")
    detail = F.concat(F.lit("was "), F.col("class"), F.lit(", is as declared now"))
    return gone.select(
        *SUBJECT,
        F.lit(classify.FindingClass.RECOVERED.value).alias("class"),
        F.lit("info").alias("severity"),
        F.array(F.col("class")).alias("flags"),
        detail.alias("detail"),
        "at",
        "first_seen",
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
