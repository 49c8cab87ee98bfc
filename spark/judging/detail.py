"""The text of a finding (`detail`), with the values, times and ids that prove the finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from ..common.safe_text import quoted, shown_difference
from ..rules.rule import FieldRule, FieldType, GroupRule, Rule
from ..sources import bounded
from ..sources.values import NOT_FINITE, NUMBER
from . import classify, evidence, masking

# If a difference is after the part of two long texts that a run has, this number of their first characters is shown.
_SHOWN: Final = 100
DELIVERY_TEXTS: Final = {
    "passed": "the group's offset is past the message: the group handled, filtered or skipped it",
    "waiting": "the message is in a queue, and the group has not handled it yet",
    "retrying": "the handler has failed, and the message waits for its next attempt",
    "unqueued": "the message is committed, but not in a queue yet (held, scheduled, or the sequencer makes no ticks)",
    "dead": "the message is a dead letter of the group",
}


def of(rule: Rule) -> Column:
    """The text of a finding, as a sentence for people."""
    groups = [F.when(F.col(f"effects_{n}") > 0, F.lit(declared.name)) for n, declared in enumerate(rule.groups)]
    acted = F.concat_ws(", ", *groups)
    group, is_group = F.col("group"), F.col("group") != ""
    states = [F.when(F.col("delivery") == state, meaning) for state, meaning in DELIVERY_TEXTS.items()]
    delivery = F.coalesce(*states, F.lit("the group does not subscribe to the topic"))
    effects = F.when(acted != "", F.concat(F.lit("acted on by: "), acted))
    count = of_group(rule, lambda number, _: F.col(f"effects_{number}")).cast("bigint")
    messages = F.when(F.col("committed") == 1, "one message").otherwise(F.format_string("%d messages", "committed"))
    # The rows that count have a time. A finding without such a row shows a row only if this row has no time.
    is_untimed = (F.col("rows") == 0) & F.col("row").isNotNull()
    no_row = F.when(is_untimed, f"the row has no time ({rule.time} is null)").otherwise("no row satisfies the rule")
    of_effect = F.concat(F.lit("an effect of "), group, F.lit(" has no committed message, and "), no_row)
    of_message = F.concat_ws("; ", F.concat(no_row, F.lit(", but a message was sent")), effects)
    doubled = F.format_string(
        "messages: %d (the oldest %s, the newest %s), rows: %d", "committed", "oldest_id", "about.message_id", "rows"
    )
    texts = {
        "ORPHAN": F.when(is_group, of_effect).otherwise(of_message),
        "HALF_STUCK": F.concat(
            F.when(F.col("parked") > 0, "the half message is parked: an operator must decide").otherwise(
                "the half message is still undecided"
            ),
            _more("open_count", "undecided messages"),
        ),
        "LOST": F.concat_ws("; ", F.lit("the row has no committed message"), effects),
        "UNREADABLE": _unreadable(),
        "DUPLICATE": F.when(is_group, F.format_string("%d effects of %s by %s", count, messages, "group")).otherwise(
            doubled
        ),
        "DEAD": F.concat(F.lit("given up by "), group, F.lit(" (dead letter)"), _more("dead_count", "dead letters")),
        "UNDELIVERED": F.concat(F.lit("no effect of "), group, F.lit(": "), delivery),
        "MISMATCH": F.concat(F.lit("row and body differ: "), _differences(rule)),
        "WRONG_EFFECT": _wrong_effect(rule),
        "WRONG_SUM": _wrong_sum(rule),
        "EARLY": _early(rule),
        "LATE": _late(rule),
        "PENDING": F.lit("too early to judge: the next run judges this key again"),
    }
    return F.coalesce(*(F.when(F.col("class") == name, text) for name, text in texts.items()))


def shown(value: Column, kind: FieldType) -> Column:
    """A value in readable form."""
    if kind is not FieldType.TIMESTAMP:
        return value
    return F.date_format(F.timestamp_micros(value.try_cast("bigint")), "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX")


def _more(count: str, what: str) -> Column:
    """The number of the key's messages or dead letters, if the finding names only the oldest of several."""
    return F.when(F.col(count) > 1, F.format_string(f", the oldest of %d {what} of the key", F.col(count))).otherwise(
        ""
    )


def mismatched(rule: Rule) -> Column:
    """The columns that differ in a MISMATCH, WRONG_EFFECT or WRONG_SUM (array<string>), in the order of the rule; null
    for other classes."""
    names = [F.when(_differs(number, field), F.lit(field.column)) for number, field in enumerate(rule.fields)]
    listed = F.array_compact(F.array(*names)) if names else F.array().cast("array<string>")
    found = F.when(F.col("class") == "MISMATCH", listed)
    for number, group in enumerate(rule.groups):
        is_group = F.col("group") == group.name
        compared = [F.when(_shown_effect(rule, place)[1], column) for column, place in group.compare_effect]
        summed = [F.when(_shown_sum(rule, number, place)[1], column) for column, place in group.sum_effect]
        for name, columns in (("WRONG_EFFECT", compared), ("WRONG_SUM", summed)):
            if columns:
                found = found.when((F.col("class") == name) & is_group, F.array_compact(F.array(*columns)))
    return found


def _differs(number: int, field: FieldRule) -> Column:
    """Whether the rule's field `number` differs between row and body by more than its tolerance."""
    return _is_apart(F.col(f"row.v{number}"), F.col(f"about.v{number}"), field)


def _is_apart(ours: Column, theirs: Column, field: FieldRule) -> Column:
    differs = ~ours.eqNullSafe(theirs)
    if field.tolerance is None:
        return differs
    distance = F.abs(ours.try_cast(NUMBER) - theirs.try_cast(NUMBER))
    return differs & F.coalesce(distance > F.lit(field.tolerance).cast(NUMBER), F.lit(True))


def of_effects(effects: DataFrame, rule: Rule) -> DataFrame:
    """Per key and group, the least and the greatest value of each compared column of the effects, in effect_v0, …"""
    kinds = enumerate(rule.groups, evidence.EFFECT)
    group = F.coalesce(*(F.when(F.col("kind") == kind, declared.name) for kind, declared in kinds))
    columns = []
    for place, field in enumerate(rule.fields):
        value = F.col(f"v{place}")
        if field.type in (FieldType.INTEGER, FieldType.DECIMAL):
            value = value.try_cast(NUMBER)
        # A null is the least one.
        least = F.when(F.count_if(value.isNull()) == 0, F.min(value))
        columns.append(F.struct(least.cast("string").alias("least"), F.max(value).cast("string").alias("most")))
    named = [column.alias(f"effect_v{place}") for place, column in enumerate(columns)]
    values = effects.select("key", group.alias("group"), *evidence.row_values(rule))
    return values.groupBy("key", "group").agg(F.count(F.lit(1)).alias("found"), *named).drop("found")


def _shown_effect(rule: Rule, place: int) -> tuple[Column, Column]:
    """Of a key's effects, the value that differs from the message, and whether one differs."""
    field, theirs = rule.fields[place], F.col(f"about.v{place}")
    least, most = (F.col(f"effect_v{place}.{name}") for name in ("least", "most"))
    is_least = _is_apart(least, theirs, field)
    return F.when(is_least, least).otherwise(most), is_least | _is_apart(most, theirs, field)


def _shown_sum(rule: Rule, number: int, place: int) -> tuple[Column, Column]:
    """The sum of a key's effects, and whether it differs from the message."""
    total = F.col(f"sum_s{place}_{number}").cast("string")
    return total, _is_apart(total, F.col(f"about.v{place}"), rule.fields[place])


def of_group(rule: Rule, value: Callable[[int, GroupRule], Column], otherwise: Column | None = None) -> Column:
    """The value for the group of the finding; for a finding about the message, `otherwise`, or null."""
    found = F.lit(None) if otherwise is None else otherwise
    for number, group in enumerate(rule.groups):
        found = F.when(F.col("group") == group.name, value(number, group)).otherwise(found)
    return found


def _wrong_effect(rule: Rule) -> Column:
    def text(_: int, group: GroupRule) -> Column:
        pairs = [
            _pair(rule, place, column, *_shown_effect(rule, place), "effect") for column, place in group.compare_effect
        ]
        return F.concat(F.lit(f"effect of {group.name} and message differ: "), F.concat_ws("; ", *pairs))

    return of_group(rule, text)


def _wrong_sum(rule: Rule) -> Column:
    def text(number: int, group: GroupRule) -> Column:
        pairs = [
            _pair(rule, place, column, *_shown_sum(rule, number, place), "sum") for column, place in group.sum_effect
        ]
        count = F.format_string(f"%d effects of {group.name.replace('%', '%%')} ", f"effects_{number}")
        return F.concat(count, F.lit("do not add up to their message: "), F.concat_ws("; ", *pairs))

    return of_group(rule, text)


def _pair(rule: Rule, place: int, column: str, ours: Column, differs: Column, where: str) -> Column:
    """The values of a column of the effects and of the message, if they differ; else null."""
    field, values = rule.fields[place], (ours, F.col(f"about.v{place}"))
    shown = [masking.shown(rule, field, F.substring(_readable(value, field), 1, _SHOWN)) for value in values]
    return F.when(differs, F.concat(F.lit(f"{column} "), *_between(shown[0], shown[1], where)))


def _early(rule: Rule) -> Column:
    is_delayed = F.coalesce(F.col("first_due_at") > F.col("row_at"), F.lit(False))
    start = F.when(is_delayed, F.col("first_due_at")).otherwise(F.col("row_at"))
    of_what = F.when(is_delayed, " older than the time for which its message was delayed").otherwise(
        " older than its row"
    )

    def text(number: int, group: GroupRule) -> Column:
        before = _span(F.unix_micros(start) - F.unix_micros(f"effect_at_{number}"))
        return F.concat(F.lit(f"the effect of {group.name} is "), before, of_what)

    return of_group(rule, text)


def _differences(rule: Rule) -> Column:
    texts = []
    for number, field in enumerate(rule.fields):
        ours, theirs, differs = F.col(f"row.v{number}"), F.col(f"about.v{number}"), _differs(number, field)
        if field.type in (FieldType.TEXT, FieldType.UUID) and not masking.is_masked(rule, field):
            # This lambda has no type hints, because Spark logs a warning about hints that it does not support.
            between = [
                F.udf(lambda *values: _shown_difference(*values), "string")(
                    F.when(differs, ours), F.when(differs, theirs), differs
                )
            ]
        else:
            shown = [masking.shown(rule, field, _readable(value, field)) for value in (ours, theirs)]
            between = _between(shown[0], shown[1])
        texts.append(F.when(differs, F.concat(F.lit(f"{field.column} "), *between)))
    return F.concat_ws("; ", *texts)


def _shown_difference(ours: str | None, theirs: str | None, differs: bool | None) -> str | None:
    """The result of `shown_difference` for two bounded texts, with the lengths of long texts."""
    if not differs:
        return None
    (row, row_length), (body, body_length) = (
        (None, 0) if form is None else bounded.parts(form) for form in (ours, theirs)
    )
    if row is not None and row == body:
        in_row = in_body = f"{quoted(row[:_SHOWN])}…"
        note = f"their first {len(row):,} characters are equal"
    else:
        in_row, in_body, note = shown_difference(row, body)
    if max(row_length, body_length) > bounded.LIMIT:
        note = "; ".join(filter(None, (note, f"the row has {row_length:,} characters, the body {body_length:,}")))
    return f"{in_row} in the row, {in_body} in the body{f' ({note})' if note else ''}"


def _between(ours: Column, theirs: Column, where: str = "row") -> list[Column]:
    absent = F.lit("null")
    return [F.coalesce(ours, absent), F.lit(f" in the {where}, "), F.coalesce(theirs, absent), F.lit(" in the body")]


def _readable(value: Column, field: FieldRule) -> Column:
    if field.type in (FieldType.DECIMAL, FieldType.INTEGER):
        # A cast to a text would write 0 as 0E-12.
        text = F.call_function("format_number", value.try_cast(NUMBER), F.lit("0.############"))
        return F.coalesce(*(F.when(value == str(place), names[0]) for place, names in NOT_FINITE.items()), text)
    if field.tolerance is not None:
        # A time with a tolerance is compared in seconds.
        value = (value.try_cast(NUMBER) * 1_000_000).cast("bigint").cast("string")
    return shown(value, field.type)


def _unreadable() -> Column:
    is_damaged = F.col("damaged_log_id").isNotNull()
    of_message = F.when(
        is_damaged, F.concat(F.lit("message "), F.col("about.message_id"), F.lit(": "), F.col("about.why"))
    )
    of_row = F.when(F.col("row.why") != "", F.concat(F.lit("the row: "), F.col("row.why")))
    unkeyed = F.when(F.col("unkeyed") > 0, F.lit("the row's key is null"))
    texts = F.concat_ws("; ", unkeyed, of_message, of_row)
    return F.when(texts != "", texts).otherwise("the body, or a compared field of the body, cannot be read")


def _late(rule: Rule) -> Column:
    of_message = F.concat(
        F.lit("the message was committed "), _span(F.unix_micros("settled_at") - F.unix_micros("row_at")),
        F.lit(" after the row's time; the limit is "), _span(classify.micros(rule.late_after_seconds or 0.0)),
    )  # fmt: skip
    due = F.unix_micros(F.greatest("row_at", F.coalesce("due_at", "row_at")))

    def late(number: int, group: GroupRule) -> Column:
        return F.concat(
            F.lit(f"the effect of {group.name} came "), _span(F.unix_micros(f"effect_at_{number}") - due),
            F.lit(" after it was due; the limit is "), _span(classify.micros(group.within_seconds)),
        )  # fmt: skip

    return of_group(rule, late, of_message)


def _span(microseconds: Column) -> Column:
    """A duration as h:mm:ss, followed by its milliseconds if they are not 0."""
    seconds = F.floor(microseconds / 1_000_000).cast("bigint")
    millis = F.floor((microseconds - seconds * 1_000_000) / 1000).cast("bigint")
    hours, rest = F.floor(seconds / 3600).cast("bigint"), seconds % 3600
    minutes = F.floor(rest / 60).cast("bigint")
    whole = F.format_string("%d:%02d:%02d", hours, minutes, rest % 60)
    return F.when(millis > 0, F.concat(whole, F.format_string(".%03d", millis))).otherwise(whole)
