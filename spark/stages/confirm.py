"""The fourth stage, the second look: reads the suspects of this run, and the open subjects of earlier runs, again by
key.

The second look reads under new snapshots. Snapshots of two databases are not of the same moment, so the first look may
see a row but not yet its message. A suspicion that still holds on the second look is a finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F

from ..common.errors import RunIncomplete, readable_errors
from ..judging import classify, detail, evidence, masking
from ..rules.rule import FindingClass, Rule
from ..sources.databases import Sources
from . import sides
from .job import Job, columns_of, write
from .prepare import PreparedRule, margin
from .scan import SUSPECT_SCHEMA, ScannedRule

MAX_BODY: Final = 1_000
SHOWN_MESSAGES: Final = 10
SCHEMA: Final = (
    "rule string, `table` string, topic string, key string, group string, class string, severity string, "
    "flags array<string>, mismatched array<string>, detail string, at timestamp, row_at timestamp, "
    "message_at timestamp, settled_at timestamp, effect_at timestamp, rows bigint, messages bigint, "
    "undecided bigint, effects bigint, message_id string, "
    "transaction_id string, log_id bigint, tag string, decided_by string, delivery string, row string, body string, "
    "evidence string, "
    "values string, carry boolean"
)
# The columns that only later stages use, and that the findings file does not have.
INTERNAL: Final = "values string, carry boolean"
OPEN_SCHEMA: Final = "rule string, key string, group string, class string, first_seen timestamp, at timestamp"
"""The subjects that the next run judges again: findings and pending subjects. The `class` of a pending subject is the
class of its earlier finding, or null."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The keys of a rule that the second look reads (key, carried, sought_at), and the number of these keys."""

    scanned: ScannedRule
    keys: DataFrame
    count: int


@dataclass(frozen=True, slots=True)
class ConfirmedRule:
    """The result of the second look at a rule.

    `target` is the table of the subjects that are not OK. `target` is None if the second look read no key.
    """

    scanned: ScannedRule
    keys: int = 0
    target: str | None = None


def collect(spark: SparkSession, scanned: Sequence[ScannedRule], still_open: DataFrame | None) -> list[Suspects]:
    """The suspects of each rule: the suspects of the first look, and the subjects of `still_open` (OPEN_SCHEMA) whose
    time is not before `window.floor`."""
    keys = [_keys(spark, each, still_open) for each in scanned]
    return [Suspects(each, wanted, wanted.count()) for each, wanted in zip(scanned, keys, strict=True)]


def _keys(spark: SparkSession, scanned: ScannedRule, still_open: DataFrame | None) -> DataFrame:
    at = F.col("at").alias("sought_at")
    suspects = (
        spark.read.schema(SUSPECT_SCHEMA).parquet(scanned.suspects).where(~F.col("class").isin("PENDING", "ERASED"))
    )
    wanted = suspects.select("key", F.lit(False).alias("carried"), at)
    if still_open is not None:
        rule, floor = scanned.prepared.rule, scanned.prepared.window.floor
        left = still_open.where((F.col("rule") == rule.name) & judgeable(F.lit(floor)))
        wanted = wanted.unionByName(left.select("key", F.lit(True).alias("carried"), at))
    return wanted.groupBy("key").agg(F.max("carried").alias("carried"), F.min("sought_at").alias("sought_at"))


def judgeable(floor: Column) -> Column:
    """Whether the time of a subject of an earlier run is not before `floor`. If `floor` is null, the result is true for
    all subjects."""
    return F.coalesce(F.col("at") >= floor, F.lit(True))


def confirm(suspects: Suspects, job: Job, sources: Sources) -> ConfirmedRule:
    """Judge the suspects again, and write every subject that is not OK.

    Keys that were carried over from an earlier run are before the window, and are judged at any age. A suspect whose
    row is older than the window is judged too: an earlier run judged the row, but the row has a new message or effect
    now. Raises RunIncomplete if a key cannot be read again.
    """
    scanned, prepared = suspects.scanned, suspects.scanned.prepared
    rule, window = prepared.rule, prepared.window
    target = job.path(f"confirmed/{job.number(rule)}")
    with readable_errors(f"re-reading the suspects of rule {rule.name!r}"):
        keys = sides.real_keys(rule, sources, suspects.keys).cache()
        listed = [row[0] for row in keys.select("key").limit(sides.MAX_KEYS + 1).collect()]
        read = sides.about_keys(prepared, keys, listed, sources)
        seen = Observation(f"seen again {rule.name}")
        gathered = evidence.gather(read.narrow, rule, window.watermark).join(keys.drop("sought_at"), "key")
        gathered = gathered.observe(seen, F.count(F.lit(1)).alias("count"))
        bounded = replace(window, carried="carried")
        judged = classify.subjects(classify.with_classes(gathered, rule, bounded), rule, bounded)
        write(_as_findings(_with_details(judged, rule, read), rule), target, SCHEMA)
        if int(seen.get["count"] or 0) < len(listed) <= sides.MAX_KEYS:
            _check_gone(prepared, read, keys, sources)
        for frame in (*read.cached, keys):
            frame.unpersist()
    return ConfirmedRule(scanned, suspects.count, target)


def _check_gone(prepared: PreparedRule, read: sides.KeySides, keys: DataFrame, sources: Sources) -> None:
    """Raise RunIncomplete if the look-up by key found nothing about a key, but the tables contain the key.

    An index may be damaged, so an empty look-up is no proof. Without this check, an empty look-up would dismiss a true
    finding.
    """
    rule = prepared.rule
    missing = keys.join(read.keys, "key", "left_anti").cache()
    oldest = missing.agg(F.unix_micros(F.min("sought_at"))).collect()[0][0]
    since = None if oldest is None else datetime.fromtimestamp(oldest / 1_000_000, UTC) - margin(rule)
    whole = sides.of_many_keys(prepared, missing.select("key"), sources, since)
    hidden = [row[0] for row in whole.keys.join(missing, "key", "left_semi").sort("key").collect()]
    for frame in (*whole.cached, missing):
        frame.unpersist()
    if hidden:
        raise RunIncomplete(
            f"{len(hidden)} suspects of rule {rule.name!r} could not be looked at again, for example {hidden[0]!r}: "
            f"the tables contain these keys, but a look-up by key finds nothing. Check the indexes of the key "
            f"(amcheck; REINDEX after a change of collation), and that the rule's key gives the same value each time. "
            f"Nothing was published."
        )


def _with_details(found: DataFrame, rule: Rule, read: sides.KeySides) -> DataFrame:
    values = [F.col(f"f{number}") for number in range(len(rule.fields))]
    shown = [
        masking.shown(rule, field, _cut(detail.shown(value, field.type))).alias(field.column)
        for value, field in zip(values, rule.fields, strict=True)
    ]
    row = F.to_json(F.struct(F.col("key").alias(rule.key), *shown), {"ignoreNullFields": "false"}).alias("json")
    shape = F.struct(row, *evidence.row_values(rule), evidence.why_row_unreadable(rule))
    # Of several rows, the finding shows one with a time.
    shown_row = F.max(F.struct(F.col("at").isNotNull(), shape.alias("row")))
    rows = read.rows.groupBy("key").agg(shown_row["row"].alias("row"))
    found = found.join(rows, "key", "left").join(_of_key(read, rule), "key", "left")
    found = found.join(_dead(read, rule), ["key", "group"], "left").withColumn("about_id", _about(rule))
    columns = ("message_id", "transaction_id", "log_id", "tag", "state", "decided_by")
    if any(group.compare_effect for group in rule.groups):
        found = found.join(detail.of_effects(read.effects, rule), ["key", "group"], "left")
    # Only the shown part of the body goes through the joins and sorts. Whole bodies would need too much memory.
    about = F.struct(
        *columns, _shown_body(rule).alias("body"), *evidence.body_values(rule), evidence.why_unreadable(rule)
    )
    messages = read.messages.select(F.col("log_id").alias("about_id"), about.alias("about"))
    found = found.join(messages, "about_id", "left").join(_newest(read), "key", "left")
    if read.deliveries is None:
        nothing = F.lit(None).cast("string")
        return found.withColumn("delivery", nothing).withColumn("group_positions", F.lit(None))
    group = F.col("consumer_group").alias("group")
    states = read.deliveries.select(F.col("log_id").alias("about_id"), group, F.col("state").alias("delivery"))
    deliveries = read.deliveries.groupBy("key", group).agg(F.min("state").alias("delivery"))
    positions = deliveries.groupBy("key").agg(
        F.sort_array(F.collect_list(F.struct("group", "delivery"))).alias("group_positions")
    )
    return found.join(states, ["about_id", "group"], "left").join(positions, "key", "left")


def _of_key(read: sides.KeySides, rule: Rule) -> DataFrame:
    """The log ids of the messages of each key that a finding may show as its message.

    The frame has no bodies, because all bodies of one key may exceed the memory of a task.
    """
    state, log_id = F.col("state"), F.col("log_id")
    is_sent, is_open = state.isin("committed", "recalled"), state.isin("undecided", "parked")
    settled = F.greatest("at", F.coalesce("decided_at", "at"))
    newest = F.struct(F.when(state == "committed", 2).when(is_sent, 1).otherwise(0), "log_id")
    columns = [
        F.count_if(is_open).alias("open_count"),
        F.min_by("message_id", F.when(is_sent, F.struct(state != "committed", "log_id"))).alias("oldest_id"),
        F.min_by("log_id", F.when(is_open, F.struct(state != "parked", "at", "log_id"))).alias("stuck_log_id"),
        F.min_by("log_id", F.when(is_sent, F.struct(settled, "log_id"))).alias("first_log_id"),
        F.min(F.when(F.col("is_damaged"), log_id)).alias("damaged_log_id"),
        F.max_by("log_id", newest).alias("newest_log_id"),
    ]
    damaged = read.messages.withColumn("is_damaged", evidence.why_unreadable(rule) != "")
    return damaged.groupBy("key").agg(*columns)


def _dead(read: sides.KeySides, rule: Rule) -> DataFrame:
    """The oldest dead letter of each key and group."""
    letters = read.dead_letters.withColumn("group", F.regexp_replace("state", "^dead ", ""))
    return letters.groupBy("key", "group").agg(
        F.min("log_id").alias("dead_log_id"), F.count(F.lit(1)).alias("dead_count")
    )


def _about(rule: Rule) -> Column:
    """The log id of the message that a finding shows as its message."""
    group, name = F.col("group"), F.col("class")
    about = F.when(name == FindingClass.HALF_STUCK, F.col("stuck_log_id"))
    about = about.when(name == FindingClass.DEAD, F.col("dead_log_id"))
    about = about.when((name == FindingClass.UNREADABLE) & F.col("damaged_log_id").isNotNull(), F.col("damaged_log_id"))
    about = about.when((name == FindingClass.LATE) & (group == ""), F.col("first_log_id"))
    newest = F.col("newest_log_id")
    if rule.has_several_messages:
        overdue = detail.of_group(rule, lambda number, _: F.col(f"overdue_ord_{number}"))
        newest = F.coalesce(F.when(name == FindingClass.UNDELIVERED, overdue), "prompt_ord", newest)
    return about.otherwise(newest)


def _newest(read: sides.KeySides) -> DataFrame:
    """The newest messages of each key with their states, in the column `newest_messages`, by ascending log id."""
    order = Window.partitionBy("key").orderBy(F.col("log_id").desc())
    newest = read.messages.withColumn("place", F.row_number().over(order)).where(F.col("place") <= SHOWN_MESSAGES)
    shown = F.struct(
        "log_id", "message_id", "transaction_id", "tag", F.col("at").alias("stored_at"), "deliver_at", "state",
        "decided_at", "decided_by",
    )  # fmt: skip
    return newest.groupBy("key").agg(F.sort_array(F.collect_list(shown)).alias("newest_messages"))


def _evidence(rule: Rule) -> Column:
    """The evidence about a key as JSON: its newest messages, its effects by group, and the position of each group."""
    effects = [
        F.struct(
            F.lit(group.name).alias("group"),
            F.col(f"effects_{number}").alias("effects"),
            F.col(f"effect_at_{number}").alias("first_at"),
            F.col(f"dead_{number}").alias("dead_letters"),
        )
        for number, group in enumerate(rule.groups)
    ]
    facts = [F.col("newest_messages").alias("messages"), F.col("group_positions").alias("deliveries")]
    facts += [F.array(*effects).alias("effects")] if effects else []
    return F.to_json(F.struct(*facts), {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"})


def _as_findings(found: DataFrame, rule: Rule) -> DataFrame:
    """The columns of the findings file, except the columns that depend on earlier results.

    docs/reconciliation/findings.md describes them.
    """
    acted = reduce(Column.__add__, (F.col(f"effects_{number}") for number in range(len(rule.groups))), F.lit(0))
    columns: dict[str, Column] = {
        "rule": F.lit(rule.name),
        "table": F.lit(rule.table),
        "topic": F.lit(rule.topic),
        "severity": detail.of_group(rule, lambda _, group: F.lit(group.severity.value), F.lit(rule.severity.value)),
        "mismatched": detail.mismatched(rule),
        "detail": detail.of(rule),
        "row_at": F.when(F.col("rows") > 0, F.col("row_at")),
        "effect_at": detail.of_group(rule, lambda number, _: F.col(f"effect_at_{number}")).cast("timestamp"),
        "messages": F.col("committed"),
        "effects": detail.of_group(rule, lambda number, _: F.col(f"effects_{number}"), acted).cast("bigint"),
        "row": F.col("row.json"),
        "evidence": _evidence(rule),
        "values": _values(rule),
    }
    for name in ("message_id", "transaction_id", "log_id", "tag", "decided_by", "body"):
        columns[name] = F.col(f"about.{name}")
    return found.select(*[columns.get(name, F.col(name)).alias(name) for name in columns_of(SCHEMA)])


def _values(rule: Rule) -> Column:
    """A digest of the compared values of a LOST row or of an ORPHAN message, else null. If both have equal values, the
    row is probably the row of the message, and its key was changed."""
    exact = [number for number, field in enumerate(rule.fields) if field.tolerance is None]
    if not exact:
        return F.lit(None).cast("string")

    def digest(side: str) -> Column:
        values = [F.col(f"{side}.v{number}") for number in exact]
        return F.when(F.coalesce(*values).isNotNull(), F.md5(F.to_json(F.struct(*values))))

    is_single = (F.col("class") == FindingClass.LOST.value) & (F.col("rows") == 1)
    is_message = (F.col("class") == FindingClass.ORPHAN.value) & (F.col("group") == "")
    return F.when(is_single, digest("row")).when(is_message, digest("about"))


def _cut(value: Column) -> Column:
    """A value of a row, cut to MAX_BODY characters (the limit for bodies)."""
    return F.when(F.length(value) > MAX_BODY, F.concat(F.substring(value, 1, MAX_BODY), F.lit("…"))).otherwise(value)


def _shown_body(rule: Rule) -> Column:
    body = F.col("body").cast("string")
    shown = F.when(F.is_valid_utf8(body), F.substring(body, 1, MAX_BODY)).otherwise(
        F.concat(F.lit("hex "), F.substring(F.hex(F.substring("body", 1, MAX_BODY)), 1, MAX_BODY))
    )
    return masking.shown_body(rule, body, shown, MAX_BODY)
