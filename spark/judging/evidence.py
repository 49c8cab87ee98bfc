"""Collects all evidence about a key in one row.

The functions bring all sides to one narrow form, unite the sides, and aggregate them once. The one aggregation needs
one shuffle; joins of the sides would need a shuffle each. The narrow form has only fixed-width columns besides the key,
so that Spark uses its hash aggregation instead of sorting. The compared fields become one 64-bit hash; a field with a
tolerance becomes a number. The functions take and return data frames or columns, and read no source.

Bodies are parsed into variants. `from_json` with a schema would take a fifth less CPU, but it reads numbers as doubles
and "1,5" as 15, and 1e99999999 keeps it busy for minutes. Spark's parser stops after the first value, so the array of
the body and a mark is parsed: text after the value is then an error, or stands in the place of the mark.

Of several messages of a row, the one that was decided last counts, because a producer sends its decision right after
COMMIT. Check-back and operators decide at an unknown time after it, so messages are sorted twice (by decision and by
earliest possible commit), and only a row that differs from the last message of both orders is a MISMATCH. Messages that
were stored in the transaction of their row have no time of commit, but are in the log in the order of their commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from ..common.safe_text import quoted
from ..rules.rule import FieldRule, FieldType, Rule
from ..sources import bounded, contract
from ..sources.values import NUMBER, from_body, from_column, json_paths
from . import json_text, masking

ROW: Final = contract.ROW_KIND
COMMITTED: Final = 1
RECALLED: Final = 2
UNDECIDED: Final = 3
PARKED: Final = 4
ROLLED_BACK: Final = 5
OTHER: Final = 6
UNKEYED: Final = 7
"""A business row whose key is null."""
EFFECT: Final = contract.EFFECT_KIND
DEAD: Final = 1000
TIMED_OUT: Final = 3000
"""A message that a group did not handle, because its time limit was over. The group owes no effect for it."""

# In the column `bad`: the content of the message is erased, encrypted for a subject, or stored outside of the broker.
ERASED: Final = -1
# The content types of outbox/erased.py and outbox/codec.py, which this package does not import.
ERASED_TYPES: Final = (
    "application/vnd.outbox.erased",
    "application/vnd.outbox.encrypted",
    "application/vnd.outbox.large",
)

_BEFORE_RECALLED: Final = 2**62
_VERSION_7: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-7"
_MARK: Final = "the end of the body"
# A number whose text has up to this many characters has all its digits as a double.
_EXACT: Final = 15
# Half a surrogate pair, or an escaped backslash before what looks like a half. The parser of this package decides.
_HALF_PAIR: Final = (
    r"(?i)\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2}|\\\\ud[89a-f]"
)
# The bounds of each type, for the error text about a value that looks right but exceeds the bounds.
_BOUNDS: Final = {
    FieldType.INTEGER: " of up to 26 digits",
    FieldType.DECIMAL: " of up to 26 digits before the point",
    FieldType.TIMESTAMP: " with a date",
}


def table_side(table: DataFrame, rule: Rule) -> DataFrame:
    """Convert business rows and effects (kind, key, at, f0…) to the narrow form."""
    raw = [F.col(f"f{number}") for number in range(len(rule.fields))]
    values = [from_column(column, field) for column, field in zip(raw, rule.fields, strict=True)]
    is_row = F.col("kind") == ROW
    return _narrow(
        table,
        rule,
        values,
        kind=F.when(F.col("key").isNull() & is_row, UNKEYED).otherwise(F.col("kind").cast("int")),
        # An effect that cannot be read differs from its message.
        bad=F.when(is_row, _bad(raw, values)).otherwise(0),
        # Of an effect with a message id (`with_keys`).
        **({"ord": F.col("log_id")} if "log_id" in table.columns else {}),
    )


def _narrow(side: DataFrame, rule: Rule, values: list[Column], *, kind: Column, **given: Column) -> DataFrame:
    """The narrow form of a side, which must have the columns key and at.

    values: the comparable forms of the compared fields.
    given: settled, due, early, ord, bad and owed, where the side has them.
    """
    times = ("settled", "due", "early") if rule.has_several_messages else ("settled", "due")
    nothing = {name: F.lit(None).cast("timestamp") for name in times}
    nothing |= {"ord": F.lit(0).cast("bigint"), "bad": F.lit(0)}
    nothing |= {"owed": F.lit(0).cast("bigint")} if rule.has_conditional_groups else {}
    return side.select(
        F.coalesce("key", F.lit("")).alias("key"),
        kind.alias("kind"),
        "at",
        *(given.get(name, column).alias(name) for name, column in nothing.items()),
        *_compared(values, rule),
    )


def broker_side(messages: DataFrame, rule: Rule, *, is_exact: bool = False) -> DataFrame:
    """Convert messages, dead letters and deliveries to the narrow form. A message whose body cannot be read has 1 in
    the column `bad`, and a message whose content is erased, encrypted or stored outside of the broker has ERASED.

    On the second look, `is_exact` is true: `messages` is then a result of `read_again`, and the compared texts are in
    their bounded form, as those of the rows.
    """
    # In steps, because Spark computes a column of a step once: so each body is parsed once.
    text, document = F.col("text"), F.col("document")
    parsed = messages.withColumn("text", F.col("body").cast("string"))
    parsed = parsed.withColumn("document", F.try_parse_json("text" if is_exact else _enclosed(text)))
    is_json = F.coalesce(F.col("content_type").startswith("application/json"), F.lit(False))
    if is_exact:
        is_damaged = ~F.is_valid_utf8(text) | (F.coalesce("again.problem", F.lit("")) != "")
    else:
        is_damaged = ~F.is_valid_utf8(text) | _is_suspicious(text, document, rule)
    unreadable = ~is_json | is_damaged if rule.fields else is_json & is_damaged
    is_erased = F.coalesce(F.col("content_type").isin(*ERASED_TYPES), F.lit(False))
    if is_exact:
        texts = {f"b{number}": value for number, value in enumerate(_texts(document, rule))}
    else:
        columns = {f"b{number}": _at(document, field, "$[0]", "string") for number, field in enumerate(rule.fields)}
        parsed = parsed.withColumns(columns)
        texts = {b: _in_range(F.col(b), document, field, "$[0]") for b, field in zip(columns, rule.fields, strict=True)}
    columns = {"unreadable": F.coalesce(unreadable, F.lit(True)), "is_erased": is_erased, **texts}
    read = parsed.withColumns(columns).drop("text", "document", "again")
    raw = [F.col(name) for name in texts]
    values = [from_body(column, field) for column, field in zip(raw, rule.fields, strict=True)]
    values = _bounded(values, rule) if is_exact else values
    is_committed = F.col("state").isin("committed", "recalled")
    is_bad = F.col("unreadable") | (_bad(raw, values) > 0)
    return _narrow(
        read,
        rule,
        values,
        kind=_kind(rule),
        settled=F.greatest("at", F.coalesce("decided_at", "at")),
        due=F.col("deliver_at"),
        early=_earliest_commit(),
        ord=F.col("log_id"),
        bad=F.when(is_committed & F.col("is_erased"), ERASED).when(is_committed & is_bad, 1).otherwise(0),
        owed=F.coalesce("owed", F.lit(0)) if rule.has_conditional_groups else F.lit(0),
    )


def _enclosed(text: Column) -> Column:
    """The text as the first element of an array, before a mark, which shows text after the first value."""
    return F.concat(F.lit("["), text, F.lit(f',"{_MARK}"]'))


def _is_suspicious(text: Column, enclosed: Column, rule: Rule) -> Column:
    """Whether a body may be anything other than one JSON document. `enclosed` is the parsed array of `_enclosed`.

    If the rule compares a field, the document must be an object.
    """
    is_whole = F.coalesce(F.try_variant_get(enclosed, "$[1]", "string") == _MARK, F.lit(False))
    if not rule.fields:
        return ~is_whole
    is_object = text.startswith("{") | F.ltrim(text, F.lit(" \t\r\n")).startswith("{")
    # Spark 4.1 reads half a surrogate pair as another character. Later versions refuse it, as PostgreSQL does.
    has_half = text.contains("\\u") & text.rlike(_HALF_PAIR)
    return ~is_whole | ~is_object | F.coalesce(has_half, F.lit(False))


def read_again(messages: DataFrame, rule: Rule) -> DataFrame:
    """Add the column `again`: for a body that is suspicious, that Spark cannot parse or that it may read wrongly, what
    the parser of this package reads (`problem` and `texts`); null for all other bodies."""
    text = F.col("body").cast("string")
    is_object = bool(rule.fields)
    paths = [[tuple(path.split(".")) for path in field.paths] for field in rule.fields]
    read = F.udf(
        lambda body: None if body is None else json_text.values_at(body, paths, is_object=is_object),
        "problem string, texts array<string>",
    )
    # Spark calls a Python function for every row, even inside of WHEN. So for a body that is not suspicious, the
    # function gets null instead of the body.
    enclosed = F.try_parse_json(_enclosed(text))
    is_suspicious = _is_suspicious(text, enclosed, rule)
    for field in rule.fields:
        found = _at(enclosed, field, "$[0]", "string")
        is_suspicious = is_suspicious | _is_inexact(found, enclosed, field, "$[0]")
    return messages.withColumn("again", read(F.when(F.is_valid_utf8(text) & is_suspicious, text)))


def _texts(document: Column, rule: Rule) -> list[Column]:
    """The texts of the compared fields of a result of `read_again`."""
    again = F.col("again")
    return [
        F.when(again.isNotNull(), F.get(again["texts"], F.lit(number))).otherwise(
            _in_range(_at(document, field, "$", "string"), document, field, "$")
        )
        for number, field in enumerate(rule.fields)
    ]


def _earliest_commit() -> Column:
    """The earliest time at which the transaction of a message may have committed; null for a message that was stored
    and decided in the transaction of its row."""
    is_later = F.col("decided_at") > F.col("at")
    return F.when(is_later, F.when(F.col("decided_by") == "P", F.col("decided_at")).otherwise(F.col("at")))


def _kind(rule: Rule) -> Column:
    state = F.col("state")
    kind = F.when(state.startswith("dead ") | state.startswith("timed out "), F.lit(OTHER)).otherwise(F.lit(UNDECIDED))
    known = {"rolled_back": ROLLED_BACK, "parked": PARKED, "recalled": RECALLED}
    for number, group in enumerate(rule.groups):
        known[f"effect {number}"] = EFFECT + number
        known[f"dead {group.name}"] = DEAD + number
        known[f"timed out {group.name}"] = TIMED_OUT + number
    # Each turn encloses those before it, so Spark compares the most frequent state first.
    for name, value in (*known.items(), ("committed", COMMITTED)):
        kind = F.when(state == name, F.lit(value)).otherwise(kind)
    return kind


def _at(document: Column, field: FieldRule, root: str, kind: str) -> Column:
    """The value of a field in a parsed body, which stands at the path `root`."""
    found = [F.try_variant_get(document, path, kind) for path in json_paths(field, root)]
    return found[0] if len(found) == 1 else F.coalesce(*found)


def _in_range(text: Column, document: Column, field: FieldRule, root: str) -> Column:
    """The text of a body's value; for a number that Spark reads as infinite or as another number, a text that is no
    number.

    Spark would give an infinite number the same text as the string "Infinity". `text` is read twice: if it is not a
    column of an earlier step, Spark also extracts it from the document twice.
    """
    is_infinite = text.isin("Infinity", "-Infinity") & _is_double(document, field, root)
    in_range = F.when(is_infinite, "a number beyond 1.8e308")
    return in_range.when(_is_inexact(text, document, field, root), "a number beyond a double").otherwise(text)


def _is_inexact(text: Column, document: Column, field: FieldRule, root: str) -> Column:
    """Whether Spark may have read a number of a body as another number: it reads a number with an exponent, or with
    more than 38 digits, as a double, which has 15 digits for certain. They are enough for the twelve decimals of a
    number below 0.001, whose text has a negative exponent."""
    if field.type not in (FieldType.INTEGER, FieldType.DECIMAL):
        return F.lit(False)
    is_long = ((F.length(text) > _EXACT) | text.contains("E")) & ~text.contains("E-")
    return F.coalesce(is_long & _is_double(document, field, root), F.lit(False))


def _is_double(document: Column, field: FieldRule, root: str) -> Column:
    found = []
    for path in json_paths(field, root):
        is_double = F.schema_of_variant(F.try_variant_get(document, path, "variant")) == "DOUBLE"
        # Of several names, the one whose text `_at` gives: a name with null does not count.
        found.append(F.when(F.try_variant_get(document, path, "string").isNotNull(), is_double))
    return is_double if len(found) == 1 else F.coalesce(*found)


def row_values(rule: Rule) -> list[Column]:
    """The compared columns of business rows, as texts in their comparable form; the rows have bounded texts."""
    values = [from_column(F.col(f"f{number}"), field) for number, field in enumerate(rule.fields)]
    return [value.cast("string").alias(f"v{number}") for number, value in enumerate(values)]


def body_values(rule: Rule) -> list[Column]:
    """The compared fields of a result of `read_again`, as texts in their comparable form; long texts are bounded."""
    texts = _texts(F.try_parse_json(F.col("body").cast("string")), rule)
    values = [from_body(column, field) for column, field in zip(texts, rule.fields, strict=True)]
    return [value.cast("string").alias(f"v{number}") for number, value in enumerate(_bounded(values, rule))]


def _bounded(values: list[Column], rule: Rule) -> list[Column]:
    return [
        bounded.in_spark(value) if field.type is FieldType.TEXT else value
        for value, field in zip(values, rule.fields, strict=True)
    ]


def why_unreadable(rule: Rule) -> Column:
    """The part of a message's body that cannot be read, with the reason, as the column `why`; '' if the whole body can
    be read."""
    text = F.col("body").cast("string")
    again = F.col("again")
    is_json = F.coalesce(F.col("content_type").startswith("application/json"), F.lit(False))
    raw = _texts(F.try_parse_json(text), rule)
    values = [from_body(column, field) for column, field in zip(raw, rule.fields, strict=True)]
    content_type = F.concat(F.lit("the content type is "), F.coalesce("content_type", F.lit("missing")))
    reason = _why_fields(raw, values, [field.body for field in rule.fields], rule)
    reason = F.when(again["problem"] != "", again["problem"]).otherwise(reason)
    reason = F.when(~F.is_valid_utf8(text), "the body is not UTF-8").otherwise(reason)
    reason = F.when(~is_json, content_type if rule.fields else F.lit("")).otherwise(reason)
    reason = F.when(F.col("content_type").isin(*ERASED_TYPES), "").otherwise(reason)
    return F.when(F.col("state").isin("committed", "recalled"), reason).otherwise("").alias("why")


def why_row_unreadable(rule: Rule) -> Column:
    """The compared columns of a business row whose values do not have the declared types, as the column `why`; '' if
    all values have their types."""
    raw = [F.col(f"f{number}") for number in range(len(rule.fields))]
    values = [from_column(column, field) for column, field in zip(raw, rule.fields, strict=True)]
    return _why_fields(raw, values, [field.column for field in rule.fields], rule).alias("why")


def _why_fields(raw: list[Column], values: list[Column], names: list[str], rule: Rule) -> Column:
    quote = F.udf(lambda text: None if text is None else quoted(text), "string")
    texts = []
    for before, after, name, field in zip(raw, values, names, rule.fields, strict=True):
        wrong = F.when(before.isNotNull() & after.isNull(), F.substring(before, 1, 60))
        kind = F.lit(f", which is no {field.type.value}{_BOUNDS.get(field.type, '')}")
        texts.append(F.concat(F.lit(f"{name} is "), masking.shown(rule, field, quote(wrong)), kind))
    return F.concat_ws("; ", *texts)


def with_keys(effects: DataFrame, ids: DataFrame, rule: Rule, floor: datetime | None) -> DataFrame:
    """Replace the message ids in the column `key` of effects by the keys of these messages.

    `ids` has the columns message_id, key, topic, tag and log_id; the effects get the column log_id. The function
    removes the effects of messages that have another topic or tag than the rule. If a message is not in `ids`, the
    effects of this message keep the message id as their key. If `floor` is given, retention has removed the messages
    before this time. With `floor`, the function also removes each effect whose message is not in `ids`, unless the
    message id is a UUID of version 7 that was made after `floor`.
    """
    known = ids.where(F.col("message_id").isNotNull()).withColumnRenamed("key", "of")
    found = effects.join(known, effects["key"] == known["message_id"], "left")
    is_known = F.col("message_id").isNotNull()
    is_ours = F.col("topic") == F.lit(rule.topic)
    if rule.tag is not None:
        is_ours = is_ours & (F.col("tag") == F.lit(rule.tag))
    could_be_there = F.lit(True) if floor is None else _made_at(F.col("key")) >= F.lit(floor)
    kept = found.where((is_known & is_ours) | (~is_known & F.coalesce(could_be_there, F.lit(False))))
    key = F.when(F.col("message_id").isNotNull(), F.col("of")).otherwise(F.col("key"))
    return kept.withColumn("key", key).drop("message_id", "of", "topic", "tag")


def _made_at(message_id: Column) -> Column:
    """The time at which an id, a UUID of version 7, was made; null for other ids."""
    digits = F.replace(message_id, F.lit("-"), F.lit(""))
    moment = F.timestamp_millis(F.conv(F.substring(digits, 1, 12), 16, 10).cast("bigint"))
    return F.when(message_id.rlike(_VERSION_7), moment)


def gather(sides: list[DataFrame], rule: Rule, watermark: datetime) -> DataFrame:
    """One row per key with the counts and times of all sides. A message is overdue if its time limit ended before
    `watermark`."""
    united = reduce(DataFrame.unionByName, sides)
    kind = F.col("kind")
    is_committed = kind.isin(COMMITTED, RECALLED)
    is_undecided = kind.isin(UNDECIDED, PARKED)
    is_row = kind.isin(ROW, UNKEYED)
    # The newest message is compared with the row. A recalled message is compared only if there is no other message.
    age = F.when(kind == COMMITTED, F.col("ord") + F.lit(_BEFORE_RECALLED)).when(kind == RECALLED, F.col("ord"))
    counts = is_row | is_committed | is_undecided | ((kind >= EFFECT) & (kind < TIMED_OUT))
    aggregates = [
        F.count_if(is_row).alias("rows"),
        F.count_if(kind == UNKEYED).alias("unkeyed"),
        _earliest("at", is_row).alias("row_at"),
        F.max(F.when(is_row, F.col("hash"))).alias("row_hash"),
        F.count_if(is_committed).alias("committed"),
        F.count_if(kind == RECALLED).alias("recalled"),
        F.count_if(is_undecided).alias("undecided"),
        F.count_if(kind == PARKED).alias("parked"),
        _earliest("at", is_undecided).alias("undecided_at"),
        _earliest("at", is_committed).alias("message_at"),
        _earliest("settled", is_committed).alias("settled_at"),
        # A recalled message delays nothing, and a message without a delay may be handled at once.
        F.max(F.when(kind == COMMITTED, F.col("due"))).alias("due_at"),
        F.when(
            F.count_if((kind == COMMITTED) & F.col("due").isNull()) == 0, F.min(F.when(kind == COMMITTED, F.col("due")))
        ).alias("first_due_at"),
        F.max_by("hash", age).alias("message_hash"),
        F.max(F.when(counts, F.greatest("at", F.coalesce("settled", "at")))).alias("touched_at"),
        F.sum(F.greatest("bad", F.lit(0))).alias("unreadable"),
        F.count_if(F.col("bad") == ERASED).alias("erased"),
    ]
    aggregates += [F.max(F.when(is_row, F.col(f"s{place}"))).alias(f"row_s{place}") for place in rule.near_places]
    aggregates += [F.max_by(f"s{place}", age).alias(f"message_s{place}") for place in rule.numbers]
    aggregates += [one for number in range(len(rule.groups)) for one in _of_group(rule, number, age)]
    # First spread the rows by key. A key has two or three rows, so Spark's own partial aggregation before the shuffle
    # would combine few rows, and would send each row as a wide buffer.
    spread = united.repartition("key")
    if rule.has_several_messages:
        aggregates += _of_last_messages(rule)
        for number in range(len(rule.groups)):
            spread = spread.withColumn(f"owing_{number}", _owing(rule, number))
            aggregates += _of_each_message(rule, number, watermark)
    return spread.groupBy("key").agg(*aggregates)


def exact_places(rule: Rule, number: int) -> list[int]:
    """The numbers of the fields that the effects of the rule's group `number` must equal without a tolerance."""
    return [place for _, place in rule.groups[number].compare_effect if rule.fields[place].tolerance is None]


def near_places(rule: Rule, number: int) -> list[int]:
    """The numbers of the fields that the effects of the rule's group `number` must equal up to a tolerance."""
    return [place for _, place in rule.groups[number].compare_effect if rule.fields[place].tolerance is not None]


def _compared(values: list[Column], rule: Rule) -> Iterator[Column]:
    """What is compared: a hash of all exact fields, per group a hash e0, e1, … of those that its effects must equal,
    and the numbers s0, s1, … of the fields that are compared as numbers."""
    exact = [value for value, field in zip(values, rule.fields, strict=True) if field.tolerance is None]
    yield (_hash(exact) if exact else F.lit(0).cast("bigint")).alias("hash")
    for number in range(len(rule.groups)):
        if exact_places(rule, number):
            yield _hash([values[place] for place in exact_places(rule, number)]).alias(f"e{number}")
    for place in rule.numbers:
        yield values[place].try_cast(NUMBER).alias(f"s{place}")


def _of_group(rule: Rule, number: int, age: Column) -> Iterator[Column]:
    """The counts, times and values of one group's effects and dead letters."""
    kind = F.col("kind")
    is_effect = kind == EFFECT + number
    yield F.count_if(is_effect).alias(f"effects_{number}")
    yield _earliest("at", is_effect).alias(f"effect_at_{number}")
    yield F.count_if(kind == DEAD + number).alias(f"dead_{number}")
    yield F.count_if(kind == TIMED_OUT + number).alias(f"timed_out_{number}")
    if exact_places(rule, number):
        yield F.max_by(f"e{number}", age).alias(f"message_e{number}")
    compared = [f"s{place}" for place in near_places(rule, number)]
    for name in (*([f"e{number}"] if exact_places(rule, number) else []), *compared):
        yield F.min(F.when(is_effect, F.col(name))).alias(f"least_{name}_{number}")
        yield F.max(F.when(is_effect, F.col(name))).alias(f"most_{name}_{number}")
    for _, place in rule.groups[number].sum_effect:
        yield F.try_sum(F.when(is_effect, F.col(f"s{place}"))).alias(f"sum_s{place}_{number}")
    if rule.groups[number].owed_when:
        yield F.count_if(_is_owed(rule, number)).alias(f"owed_{number}")


def _is_owed(rule: Rule, number: int) -> Column:
    """Whether the rule's group `number` owes an effect for a message."""
    is_sent = F.col("kind") == COMMITTED
    return is_sent & (F.col("owed").bitwiseAND(F.lit(1 << number)) != 0) if rule.groups[number].owed_when else is_sent


def _of_last_messages(rule: Rule) -> Iterator[Column]:
    """The compared values of the last message in the order of the decisions (`prompt`), and in that of the earliest
    possible commits (`early`). Recalled messages come before all others."""
    kind, early = F.col("kind"), F.col("early")
    is_sent = kind.isin(COMMITTED, RECALLED)
    yield F.count_if(is_sent & early.isNull()).alias("in_log_order")
    yield F.max(F.when(is_sent, F.col("settled"))).alias("newest_settled_at")
    for name, time in (("prompt", F.when(early.isNotNull(), F.col("settled"))), ("early", early)):
        place = F.when(is_sent, F.struct(kind == COMMITTED, time, "ord"))
        for value in ("ord", "hash", *(f"s{place}" for place in rule.near_places)):
            yield F.max_by(value, place).alias(f"{name}_{value}")


def _owing(rule: Rule, number: int) -> Column:
    """The time from which the rule's group `number` may handle a message; null if it owes no effect for the message,
    or has an effect that names the message."""
    is_owed = _is_owed(rule, number)
    if rule.groups[number].key is None:
        handles = F.col("kind").isin(EFFECT + number, TIMED_OUT + number)
        is_owed = is_owed & ~F.bool_or(handles).over(Window.partitionBy("key", "ord"))
    return F.when(is_owed, F.greatest("at", F.coalesce("due", "at")))


def _of_each_message(rule: Rule, number: int, watermark: datetime) -> Iterator[Column]:
    """The numbers and the newest times of a group's messages (`_owing`), and the time of its newest effect."""
    due, group = F.col(f"owing_{number}"), rule.groups[number]
    overdue = F.when(due < F.lit(watermark - timedelta(seconds=group.within_seconds)), due)
    yield F.count(due).alias(f"owing_{number}")
    yield F.max(due).alias(f"newest_due_{number}")
    yield F.count(overdue).alias(f"overdue_{number}")
    yield F.max(overdue).alias(f"newest_overdue_{number}")
    yield F.max_by("ord", overdue).alias(f"overdue_ord_{number}")
    yield F.max(F.when(F.col("kind") == EFFECT + number, F.col("at"))).alias(f"newest_effect_{number}")


def _earliest(column: str, condition: Column) -> Column:
    return F.min(F.when(condition, F.col(column)))


def _hash(values: list[Column]) -> Column:
    # xxhash64 skips nulls. So the hash also covers whether each value is null, because (null, 'a') and ('a', null) must
    # have different hashes.
    return F.xxhash64(*(part for value in values for part in (value, value.isNull())))


def _bad(raw: list[Column], values: list[Column]) -> Column:
    checks = [(before.isNotNull() & after.isNull()).cast("int") for before, after in zip(raw, values, strict=True)]
    return F.greatest(F.lit(0), F.lit(0), *checks)
