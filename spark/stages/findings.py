"""The fifth stage: compares the run with the previous result, and finds new, open and recovered findings.

This stage writes the findings. These findings become valid when the last stage has written `result.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as Frame
from pyspark.sql import functions as F

from ..common.errors import RunIncomplete
from ..judging import causes
from ..judging.causes import Cause
from ..judging.classify import Window
from ..judging.remedies import with_remedies
from ..rules.rule import CLASSES, FAULTS, Acknowledgement, FindingClass
from . import confirm
from .confirm import OPEN_SCHEMA, ConfirmedRule, judgeable
from .job import Job, check_parts, columns_of, empty_frame, put, write
from .scan import SUSPECT_SCHEMA, Counts

SUBJECT: Final = ["rule", "key", "group"]
FINDINGS_SCHEMA: Final = (
    confirm.SCHEMA.removesuffix(confirm.INTERNAL)
    + "first_seen timestamp, was string, acknowledged string, remedy string"
)
# A message is stored at most this long before its row is written: check-back parks an older half message.
PAIR_SECONDS: Final = 72 * 3600
_FAULTS: Final = [name.value for name in FAULTS]


@dataclass(frozen=True, slots=True)
class JudgedRule:
    """A rule with its final counts.

    A suspect is counted under the class that the second look gave it. Each other key is counted under the class that
    the first look gave it.
    """

    confirmed: ConfirmedRule
    counts: Counts


@dataclass(frozen=True, slots=True)
class Findings:
    """The written findings of a run and their causes. `written` is None if no subject is suspected, pending or open.

    `still_open` is the number of subjects that the next run judges again.
    """

    rules: list[JudgedRule]
    written: DataFrame | None
    causes: list[Cause]
    still_open: int

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged findings."""
        return sum(each.first_acknowledged for each in self.causes)

    @property
    def new(self) -> int:
        """The number of findings that no earlier result had and that are not acknowledged."""
        return sum(each.first_new for each in self.causes)


def collect(spark: SparkSession, rules: Sequence[ConfirmedRule], still_open: DataFrame | None, job: Job) -> Findings:
    """Write the findings, and the subjects that the next run judges again (OPEN_SCHEMA).

    `still_open` has the open subjects of the previous result. Raises RunIncomplete if a part of an interval cannot be
    judged yet.
    """
    written: DataFrame | None = None
    by_cause: list[Cause] = []
    left = 0
    if still_open is None and not any(each.keys or each.scanned.saw(FindingClass.PENDING) for each in rules):
        job.write_empty("findings", FINDINGS_SCHEMA)
        job.write_empty("open", OPEN_SCHEMA)
    else:
        written, by_cause, left = _write(spark, rules, still_open, job)
    judged = _judged(spark, rules, written, by_cause)
    _check_interval(judged)
    return Findings(judged, written, by_cause, left)


def _write(
    spark: SparkSession, rules: Sequence[ConfirmedRule], still_open: DataFrame | None, job: Job
) -> tuple[DataFrame, list[Cause], int]:
    earlier = empty_frame(spark, OPEN_SCHEMA) if still_open is None else still_open
    confirmed, target = _confirmed(spark, rules), job.path("findings")
    if still_open is not None or all(
        any(each.scanned.saw(name) for each in rules) for name in (FindingClass.LOST, FindingClass.ORPHAN)
    ):
        confirmed = with_changed_keys(confirmed)
    waiting = pending(_suspects(spark, rules).where("class = 'PENDING'"), confirmed, earlier)
    windows = {each.scanned.prepared.rule.name: each.scanned.prepared.window for each in rules}
    found = compared(confirmed, earlier, waiting, windows)
    in_force = [each for each in job.rules.acknowledged if job.started < each.until]
    found = with_remedies(with_acknowledgements(found, in_force))
    # One task sorts the findings and writes one file. For several tasks, Spark would compute all findings twice.
    ordered = found.select(*columns_of(FINDINGS_SCHEMA)).repartition(1).sortWithinPartitions(*causes.order())
    count = put(ordered, target)
    written = spark.read.schema(FINDINGS_SCHEMA).parquet(target)
    by_cause = causes_of(written)
    check_parts(target, count, sum(each.first_findings for each in by_cause))
    columns = columns_of(OPEN_SCHEMA)
    left = written.where(F.col("class").isin(_FAULTS)).select(*columns).unionByName(waiting.select(*columns))
    return written, by_cause, write(left.coalesce(1), job.path("open"), OPEN_SCHEMA)


def _suspects(spark: SparkSession, rules: Sequence[ConfirmedRule]) -> DataFrame:
    frames = [
        spark.read.schema(SUSPECT_SCHEMA)
        .parquet(each.scanned.suspects)
        .withColumn("rule", F.lit(each.scanned.prepared.rule.name))
        for each in rules
    ]
    return reduce(DataFrame.unionByName, frames)


def _confirmed(spark: SparkSession, rules: Sequence[ConfirmedRule]) -> DataFrame:
    paths = [each.target for each in rules if each.target is not None]
    return spark.read.schema(confirm.SCHEMA).parquet(*paths) if paths else empty_frame(spark, confirm.SCHEMA)


def with_changed_keys(confirmed: DataFrame) -> DataFrame:
    """The confirmed subjects, in which an ORPHAN and a LOST with equal values and close times are one finding.

    Such a pair is probably one row whose key was changed, or one message that was sent under another key. If the row
    were published again, all groups would act twice. The ORPHAN stays and names the other key. The LOST becomes
    PENDING, so that the next run judges its key again.
    """
    is_lost = F.col("class") == FindingClass.LOST.value
    is_orphan = (F.col("class") == FindingClass.ORPHAN.value) & (F.col("group") == "")
    moment = F.when(is_lost, F.col("row_at")).otherwise(F.coalesce("message_at", "at"))
    candidates = confirmed.where(F.col("values").isNotNull()).withColumn("moment", moment)
    by_time = Frame.partitionBy("rule", "values").orderBy("moment", "key")
    lost = F.when(is_lost, F.struct("key", "moment"))
    before = F.last(lost, ignorenulls=True).over(by_time.rowsBetween(Frame.unboundedPreceding, Frame.currentRow))
    after = F.first(lost, ignorenulls=True).over(by_time.rowsBetween(Frame.currentRow, Frame.unboundedFollowing))

    def distance(side: str) -> Column:
        return F.abs(F.unix_micros("moment") - F.unix_micros(f"{side}.moment"))

    nearer = F.coalesce(distance("before") <= distance("after"), F.col("before").isNotNull())
    pairs = (
        candidates.withColumns({"before": before, "after": after})
        .where(is_orphan)
        .withColumn("other", F.when(nearer, F.col("before")).otherwise(F.col("after")))
        .where(distance("other") <= PAIR_SECONDS * 1_000_000)
        .select("rule", "key", F.lit("").alias("group"), F.lit(FindingClass.ORPHAN.value).alias("class"), "other.key")
        .toDF("rule", "key", "group", "class", "other_key")
    )
    halves = pairs.select("rule", F.col("other_key").alias("key"), F.lit(FindingClass.LOST.value).alias("class"))
    halves = halves.distinct().withColumn("is_half", F.lit(True))
    joined = confirmed.join(pairs, [*SUBJECT, "class"], "left").join(halves, ["rule", "key", "class"], "left")
    is_half = F.coalesce("is_half", F.lit(False))
    text = F.concat(
        F.col("detail"), F.lit(". The row with key "), F.col("other_key"),
        F.lit(
            " has the same values and no message: probably its key was changed, or the message was sent under another "
            "key. Do not publish the row again: the groups that handled this message would act twice"
        ),
    )  # fmt: skip
    columns = {
        "detail": F.coalesce(text, "detail"),
        "class": F.when(is_half, FindingClass.PENDING.value).otherwise(F.col("class")),
        "carry": F.col("carry") | is_half,
    }
    return joined.withColumns(columns).drop("other_key", "is_half")


def compared(confirmed: DataFrame, earlier: DataFrame, pending: DataFrame, windows: Mapping[str, Window]) -> DataFrame:
    """The findings of this run, and RECOVERED or EXPIRED for each earlier finding that does not hold any more.

    The column `first_seen` is the boundary of the run that found the finding first. The column `was` is the finding's
    class in the previous result; null means that the finding is new.

    `earlier` has the open subjects of the previous result, `pending` has the pending subjects of this run, and
    `windows` has the window of each rule.
    """
    faults = confirmed.where(F.col("class").isin(_FAULTS)).drop("values", "carry")
    known = earlier.where(F.col("class").isNotNull()).select(
        *SUBJECT, F.col("first_seen").alias("known_since"), F.col("class").alias("was")
    )
    first_seen = F.coalesce("known_since", _by_rule({rule: each.until for rule, each in windows.items()}))
    current = faults.join(known, SUBJECT, "left").withColumn("first_seen", first_seen).drop("known_since")
    gone = earlier.join(current.select(*SUBJECT), SUBJECT, "left_anti")
    gone = gone.join(pending.select(*SUBJECT), SUBJECT, "left_anti")
    floor = _by_rule({rule: each.floor for rule, each in windows.items()})
    return current.unionByName(closed(gone.withColumn("floor", floor)), allowMissingColumns=True)


def _by_rule(times: Mapping[str, datetime | None]) -> Column:
    """A column that contains, for each row, the time that `times` has for the name of the row's rule."""
    return F.coalesce(*(F.when(F.col("rule") == rule, F.lit(time).cast("timestamp")) for rule, time in times.items()))


def closed(gone: DataFrame) -> DataFrame:
    """The rows for earlier open subjects that are neither findings nor pending now. A subject from before the floor is
    EXPIRED; the others are RECOVERED."""
    is_expired = ~judgeable(F.col("floor"))
    was = F.coalesce("class", F.lit(FindingClass.PENDING.value))
    floor = F.date_format("floor", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    reason = F.concat(
        F.lit("the subject was "), was, F.lit(". It is from before "), floor,
        F.lit(". Retention may have removed its evidence, so the run cannot judge the subject any more"),
    )  # fmt: skip
    name = F.when(is_expired, FindingClass.EXPIRED.value).otherwise(FindingClass.RECOVERED.value)
    return gone.where(is_expired | F.col("class").isNotNull()).select(
        *SUBJECT,
        name.alias("class"),
        F.when(is_expired, "warning").otherwise("info").alias("severity"),
        F.array_compact(F.array(F.col("class"))).alias("flags"),
        F.when(is_expired, reason)
        .otherwise(F.concat(F.lit("the subject was "), was, F.lit("; everything is as declared now")))
        .alias("detail"),
        "at",
        "first_seen",
        F.col("class").alias("was"),
    )


def pending(scanned: DataFrame, confirmed: DataFrame, earlier: DataFrame) -> DataFrame:
    """The pending subjects that the next run must judge again, each with the class of its earlier finding, if there is
    one. If a changed rule or a full run sets the boundary to an earlier time, an earlier finding about a row after the
    boundary stays open."""
    columns = [*SUBJECT, "at"]
    unjudged = confirmed.where("class = 'PENDING'").join(earlier.select(*SUBJECT), SUBJECT, "left_semi")
    waiting = scanned.where("carry").select(*columns).unionByName(confirmed.where("carry").select(*columns))
    unique = waiting.unionByName(unjudged.select(*columns)).groupBy(*SUBJECT).agg(F.min("at").alias("at"))
    current = confirmed.where(F.col("class").isin(_FAULTS)).select(*SUBJECT)
    known = earlier.select(*SUBJECT, "class", "first_seen")
    return unique.join(current, SUBJECT, "left_anti").join(known, SUBJECT, "left").select(*columns_of(OPEN_SCHEMA))


def with_acknowledgements(findings: DataFrame, given: Sequence[Acknowledgement]) -> DataFrame:
    """Add the column `acknowledged` to the findings: author, end and reason of the acknowledgement; null if there is
    none."""
    known = {(each.rule, each.key, each.finding_class, each.group): each.text for each in given}
    # A lambda, because Spark would evaluate the annotations of a function.
    find = F.udf(lambda *subject: known.get(subject) or known.get((*subject[:3], None)), "string")
    text = find("rule", "key", "class", "group") if known else F.lit(None).cast("string")
    return findings.withColumn("acknowledged", text)


def causes_of(findings: DataFrame) -> list[Cause]:
    """The causes of written findings, the most urgent first, computed in one pass. A finding counts in each detail."""
    is_fault, is_known = F.col("class").isin(_FAULTS), F.col("acknowledged").isNotNull()
    is_new = is_fault & ~is_known & F.col("was").isNull()
    counted = {"findings": F.lit(True), "new": is_new, "acknowledged": is_fault & is_known}
    oldest = F.date_trunc("second", F.coalesce("message_at", "row_at", "at")).alias("oldest")
    details = F.posexplode(causes.column()).alias("place", "detail")
    subject = ("rule", F.col("class").alias("finding_class"), "group")
    in_details = findings.select(
        *subject, "severity", oldest, *(flag.alias(name) for name, flag in counted.items()), details
    )
    grouped = in_details.groupBy("rule", "finding_class", "group", "detail").agg(
        F.max("severity").alias("severity"),
        F.date_format(F.min("oldest"), "yyyy-MM-dd'T'HH:mm:ss'Z'").alias("oldest"),
        *(F.count_if(name).alias(name) for name in counted),
        *(F.count_if(F.col(name) & (F.col("place") == 0)).alias(f"first_{name}") for name in counted),
    )
    return causes.ordered(Cause(**row.asDict()) for row in grouped.collect())


def _judged(
    spark: SparkSession, rules: Sequence[ConfirmedRule], written: DataFrame | None, by_cause: Sequence[Cause]
) -> list[JudgedRule]:
    """The final counts of each rule."""
    dismissed = {} if written is None else _dismissed(spark, rules, written)
    judged = []
    for each in rules:
        name, skipped, counts = each.scanned.prepared.rule.name, each.scanned.checksums.skipped_rows, {}
        for subject, seen in each.scanned.counts.items():
            counts[subject] = dict.fromkeys((known.value for known in CLASSES), 0)
            for cause in by_cause:
                if (cause.rule, cause.group) == (name, subject):
                    counts[subject][cause.finding_class] += cause.first_findings
            counts[subject]["OK"] = seen["OK"] + dismissed.get((name, subject, "OK"), 0) + skipped
            for waits in ("PENDING", "ERASED"):
                counts[subject][waits] = seen[waits] + dismissed.get((name, subject, waits), 0)
        judged.append(JudgedRule(each, counts))
    return judged


def _dismissed(spark: SparkSession, rules: Sequence[ConfirmedRule], findings: DataFrame) -> dict[tuple[str, ...], int]:
    """The number of suspects that the second look judged OK, PENDING or ERASED, by rule, group and that class."""
    if not any(each.keys for each in rules):
        return {}
    suspects = _suspects(spark, rules).where("class NOT IN ('PENDING', 'ERASED')").select(*SUBJECT)
    none = suspects.join(findings.select(*SUBJECT), SUBJECT, "left_anti")
    # A LOST that is not among the findings is a part of an ORPHAN (`with_changed_keys`), and counted there.
    waiting = _confirmed(spark, rules).where("class IN ('PENDING', 'ERASED', 'LOST')")
    waiting = waiting.select(*SUBJECT, F.col("class").alias("is"))
    counted = none.join(waiting, SUBJECT, "left").groupBy("rule", "group", F.coalesce("is", F.lit("OK")))
    return {tuple(row)[:-1]: int(row["count"]) for row in counted.count().collect()}


def _check_interval(rules: Sequence[JudgedRule]) -> None:
    """Raise RunIncomplete if an interval has pending subjects whose time limits have not passed yet.

    After the longest limit of the rule, only delayed messages can be pending, and the run publishes the interval with
    these messages as PENDING.
    """
    for each in rules:
        rule, window = each.confirmed.scanned.prepared.rule, each.confirmed.scanned.prepared.window
        left = sum(counts["PENDING"] for counts in each.counts.values())
        judgeable_at = window.until + rule.longest_wait
        if window.is_exact and left and window.watermark < judgeable_at:
            raise RunIncomplete(
                f"rule {rule.name!r}: {left} subjects of the interval cannot be judged yet, because their "
                f"time limits have not passed. Repeat the run after {judgeable_at.isoformat()}."
            )
