"""The second look: suspects, and what earlier runs left open, are read again by key under new snapshots.

What the first look saw only because two databases have no common moment is gone by now; a finding is what still holds.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from . import classify, evidence, sides
from .errors import RunIncomplete
from .rules import FieldType, Rule, Severity
from .scan import readable_errors, write

MAX_KEYS: Final = 50_000
MAX_BODY: Final = 1_000
DELIVERY_TEXTS: Final = {
    "passed": "the group is past the message (handled, filtered or skipped)",
    "waiting": "queued, not consumed yet",
    "retrying": "it failed and waits for its next attempt",
    "unqueued": "committed, but not queued yet (held, scheduled, or the sequencer stands still)",
    "dead": "it is a dead letter",
}
SCHEMA: Final = (
    "rule string, `table` string, topic string, key string, group string, class string, severity string, "
    "flags array<string>, detail string, at timestamp, row_at timestamp, message_at timestamp, settled_at timestamp, "
    "effect_at timestamp, rows bigint, messages bigint, undecided bigint, effects bigint, message_id string, "
    "transaction_id string, log_id bigint, tag string, decided_by string, delivery string, row string, body string, "
    "carry boolean"
)


def confirm(
    spark: SparkSession,
    rule: Rule,
    sources: sides.Sources,
    window: classify.Window,
    keys: DataFrame,
    target: str,
) -> None:
    """Judge `keys` (key, carried, sought_at) again and write every subject that is not OK to `target` (Parquet).

    Carried keys lie before the window; they are judged whatever their age. So are suspects whose row is older than the
    window: a second message or effect came to a row that an earlier run has judged. Raises RunIncomplete when a key
    cannot be looked at again.
    """
    with readable_errors(f"re-reading the suspects of rule {rule.name!r}"):
        keys = sides.real_keys(rule, sources, keys).cache()
        listed = [row[0] for row in keys.select("key").limit(MAX_KEYS + 1).collect()]
        read = sides.of_keys(rule, sources, listed, window.floor) if len(listed) <= MAX_KEYS else None
        if read is None:
            read = sides.of_many_keys(rule, sources, keys.select("key"), window.floor)
        seen = Observation(f"seen again {rule.name}")
        gathered = evidence.gather(read.narrow, rule).join(keys.drop("sought_at"), "key")
        gathered = gathered.observe(seen, F.count(F.lit(1)).alias("count"))
        bounded = replace(window, carried="carried")
        judged = classify.subjects(classify.with_classes(gathered, rule, bounded), rule, bounded)
        with_details = _with_details(judged, rule, read)
        write(spark, _as_findings(with_details, rule), target, SCHEMA)
        if int(seen.get["count"] or 0) < len(listed) <= MAX_KEYS:
            _check_gone(rule, sources, read, keys, window.floor)
        for frame in (*read.cached, keys):
            frame.unpersist()


def _check_gone(
    rule: Rule, sources: sides.Sources, read: sides.KeySides, keys: DataFrame, floor: datetime | None
) -> None:
    """Raise RunIncomplete unless keys of which nothing was found by key are not there either when tables are read.

    That a lookup finds nothing proves nothing: an index may be damaged. It would dismiss what was seen before.
    """
    missing = keys.join(_keys_of(read.narrow), "key", "left_anti").cache()
    oldest = missing.agg(F.unix_micros(F.min("sought_at"))).collect()[0][0]
    since = None if oldest is None else datetime.fromtimestamp(oldest / 1_000_000, UTC) - sides.margin(rule)
    whole = sides.of_many_keys(rule, sources, missing.select("key"), floor, since)
    hidden = [row[0] for row in _keys_of(whole.narrow).join(missing, "key", "left_semi").sort("key").collect()]
    for frame in (*whole.cached, missing):
        frame.unpersist()
    if hidden:
        raise RunIncomplete(
            f"{len(hidden)} suspects of rule {rule.name!r} could not be looked at again, as {hidden[0]!r}: they are in "
            f"the tables, but are not found by their keys. Check the indexes of the key (amcheck; REINDEX after a "
            f"change of collation), and that the rule's key gives the same value each time. Nothing was published."
        )


def _keys_of(narrow: list[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionByName, [side.select("key") for side in narrow]).distinct()


def _with_details(found: DataFrame, rule: Rule, read: sides.KeySides) -> DataFrame:
    values = [F.col(f"f{number}") for number in range(len(rule.fields))]
    shown = [_shown(value, field.type).alias(field.column) for value, field in zip(values, rule.fields, strict=True)]
    row = F.to_json(F.struct(F.col("key").alias(rule.key), *shown), {"ignoreNullFields": "false"}).alias("json")
    rows = read.rows.groupBy("key").agg(F.max(F.struct(row, *evidence.row_values(rule))).alias("row"))
    rank = F.when(F.col("state") == "committed", 2).when(F.col("state") == "recalled", 1).otherwise(0)
    newest = F.struct(rank, "log_id")
    columns = ("message_id", "transaction_id", "log_id", "tag", "state", "decided_by", "body")
    shape = F.struct(*columns, *evidence.body_values(rule))
    messages = read.messages.groupBy("key").agg(F.max_by(shape, newest).alias("newest"))
    found = found.join(rows, "key", "left").join(messages, "key", "left")
    if read.deliveries is None:
        return found.withColumn("delivery", F.lit(None).cast("string"))
    group = F.col("consumer_group").alias("group")
    deliveries = read.deliveries.groupBy("key", group).agg(F.min("state").alias("delivery"))
    return found.join(deliveries, ["key", "group"], "left")


def _shown(value: Column, kind: FieldType) -> Column:
    if kind is not FieldType.TIMESTAMP:
        return value
    return F.date_format(F.timestamp_micros(value.try_cast("bigint")), "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX")


def _as_findings(found: DataFrame, rule: Rule) -> DataFrame:
    """The columns of the findings file (docs/reconciliation.md), but those that depend on earlier results."""
    group = F.col("group")
    severity = F.lit(rule.severity.value)
    effects, effect_at = F.lit(None).cast("bigint"), F.lit(None).cast("timestamp")
    for number, declared in enumerate(rule.groups):
        severity = F.when(group == declared.name, F.lit(declared.severity.value)).otherwise(severity)
        effects = F.when(group == declared.name, F.col(f"effects_{number}")).otherwise(effects)
        effect_at = F.when(group == declared.name, F.col(f"effect_at_{number}")).otherwise(effect_at)
    body = F.col("newest.body").cast("string")
    shown_body = F.when(F.is_valid_utf8(body), F.substring(body, 1, MAX_BODY)).otherwise(
        F.concat(F.lit("hex "), F.substring(F.hex("newest.body"), 1, MAX_BODY))
    )
    return found.select(
        F.lit(rule.name).alias("rule"),
        F.lit(rule.table).alias("table"),
        F.lit(rule.topic).alias("topic"),
        "key",
        "group",
        "class",
        severity.alias("severity"),
        "flags",
        _detail(rule).alias("detail"),
        "at",
        F.when(F.col("rows") > 0, F.col("row_at")).alias("row_at"),
        "message_at",
        "settled_at",
        effect_at.alias("effect_at"),
        "rows",
        F.col("committed").alias("messages"),
        "undecided",
        effects.alias("effects"),
        F.col("newest.message_id").alias("message_id"),
        F.col("newest.transaction_id").alias("transaction_id"),
        F.col("newest.log_id").alias("log_id"),
        F.col("newest.tag").alias("tag"),
        F.col("newest.decided_by").alias("decided_by"),
        "delivery",
        F.col("row.json").alias("row"),
        shown_body.alias("body"),
        "carry",
    )


def _detail(rule: Rule) -> Column:
    """A sentence for people."""
    groups = [F.when(F.col(f"effects_{n}") > 0, F.lit(group.name)) for n, group in enumerate(rule.groups)]
    acted = F.array_join(F.array_compact(F.array(*groups)), ", ") if groups else F.lit("")
    of_group, is_group = F.col("group"), F.col("group") != ""
    delivery = F.lit("the group does not subscribe to the topic")
    for state, meaning in DELIVERY_TEXTS.items():
        delivery = F.when(F.col("delivery") == state, F.lit(meaning)).otherwise(delivery)
    effects = F.concat_ws(" ", F.lit("acted on by:"), acted)
    texts = {
        "ORPHAN": F.when(is_group, F.concat_ws(" ", F.lit("an effect of"), of_group, F.lit("without row and message")))
        .when(acted != "", F.concat(F.lit("no row satisfies the rule, but a message was sent; "), effects))
        .otherwise(F.lit("no row satisfies the rule, but a message was sent")),
        "HALF_STUCK": F.when(
            F.col("parked") > 0, F.lit("the half message is parked: an operator must decide")
        ).otherwise(F.lit("the half message is still undecided")),
        "LOST": F.lit("the row has no message"),
        "UNREADABLE": F.when(F.col("unkeyed") > 0, F.lit("the row's key is null")).otherwise(
            F.lit("the body, or a compared field of it, cannot be read")
        ),
        "DUPLICATE": F.when(is_group, _counted("effects of one message by", "group", rule)).otherwise(
            F.format_string("messages: %d, rows: %d", F.col("committed"), F.col("rows"))
        ),
        "DEAD": F.concat_ws(" ", F.lit("given up by"), of_group, F.lit("(dead letter)")),
        "UNDELIVERED": F.concat(F.lit("no effect of "), of_group, F.lit(": "), delivery),
        "MISMATCH": F.concat(F.lit("row and body differ: "), _differences(rule)),
        "LATE": F.when(is_group, F.concat_ws(" ", F.lit("the effect of"), of_group, F.lit("came late"))).otherwise(
            F.lit("the message was committed late")
        ),
        "PENDING": F.lit("not to be judged yet"),
    }
    result = F.lit(None).cast("string")
    for name, text in texts.items():
        result = F.when(F.col("class") == name, text).otherwise(result)
    return result


def _counted(text: str, column: str, rule: Rule) -> Column:
    count = F.lit(None).cast("bigint")
    for number, group in enumerate(rule.groups):
        count = F.when(F.col("group") == group.name, F.col(f"effects_{number}")).otherwise(count)
    return F.concat_ws(" ", count.cast("string"), F.lit(text), F.col(column))


def _differences(rule: Rule) -> Column:
    texts = []
    for number, field in enumerate(rule.fields):
        ours, theirs = F.col(f"row.v{number}"), F.col(f"newest.v{number}")
        differs = ~ours.eqNullSafe(theirs)
        if field.tolerance is not None:
            distance = F.abs(ours.try_cast(evidence.NUMBER) - theirs.try_cast(evidence.NUMBER))
            differs = differs & F.coalesce(distance > F.lit(field.tolerance).cast(evidence.NUMBER), F.lit(True))
        shown = (_readable(value, field.type) for value in (ours, theirs))
        texts.append(F.when(differs, F.concat(F.lit(f"{field.column} "), *_between(*shown))))
    return F.array_join(F.array_compact(F.array(*texts)), "; ") if texts else F.lit("")


def _between(ours: Column, theirs: Column) -> list[Column]:
    absent = F.lit("null")
    return [F.coalesce(ours, absent), F.lit(" in the row, "), F.coalesce(theirs, absent), F.lit(" in the body")]


def _readable(value: Column, kind: FieldType) -> Column:
    if kind in (FieldType.DECIMAL, FieldType.INTEGER):
        return F.regexp_replace(value, r"\.?0+$", "")
    return _shown(value, kind)


def severity_order(severity: str) -> int:
    """Position in a report: the most urgent first."""
    return list(Severity).index(Severity(severity))
