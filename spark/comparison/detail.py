"""The text of a finding (`detail`), with the values, times and ids that prove the finding."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from ..common.safe_text import quoted, shown_difference
from ..rules import masking
from ..rules.rule import FieldRule, FieldType, Rule
from ..sources import bounded
from ..sources.values import NOT_FINITE, NUMBER

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
    groups = [F.when(F.col(f"effects_{n}") > 0, F.lit(group.name)) for n, group in enumerate(rule.groups)]
    acted = F.array_join(F.array_compact(F.array(*groups)), ", ") if groups else F.lit("")
    of_group, is_group = F.col("group"), F.col("group") != ""
    delivery = F.lit("the group does not subscribe to the topic")
    for state, meaning in DELIVERY_TEXTS.items():
        delivery = F.when(F.col("delivery") == state, F.lit(meaning)).otherwise(delivery)
    effects = F.concat_ws(" ", F.lit("acted on by:"), acted)
    # The rows that count have a time. A finding without such a row shows a row only if this row has no time.
    is_untimed = (F.col("rows") == 0) & F.col("row").isNotNull()
    no_row = F.when(is_untimed, f"the row has no time ({rule.time} is null)")
    no_subject = F.lit(" has no row and no message")
    texts = {
        "ORPHAN": F.when(
            is_group,
            F.concat(
                F.lit("an effect of "), of_group, F.coalesce(F.concat(F.lit(" has no message; "), no_row), no_subject)
            ),
        ).otherwise(
            F.concat_ws(
                "; ",
                F.concat(F.coalesce(no_row, F.lit("no row satisfies the rule")), F.lit(", but a message was sent")),
                F.when(acted != "", effects),
            )
        ),
        "HALF_STUCK": F.concat(
            F.when(F.col("parked") > 0, "the half message is parked: an operator must decide").otherwise(
                "the half message is still undecided"
            ),
            _more("open_count", "undecided messages"),
        ),
        "LOST": F.when(
            acted != "",
            F.concat(
                F.lit(
                    "no message has the row's key, but there are effects with this key: was the message sent under "
                    "another key? "
                ),
                effects,
            ),
        ).otherwise("the row has no message"),
        "UNREADABLE": _unreadable(),
        "DUPLICATE": F.when(is_group, _surplus_effects(rule)).otherwise(
            F.format_string(
                "messages: %d (the oldest %s, the newest %s), rows: %d",
                "committed",
                "oldest_id",
                "about.message_id",
                "rows",
            )
        ),
        "DEAD": F.concat(F.lit("given up by "), of_group, F.lit(" (dead letter)"), _more("dead_count", "dead letters")),
        "UNDELIVERED": F.concat(F.lit("no effect of "), of_group, F.lit(": "), delivery),
        "MISMATCH": F.concat(F.lit("row and body differ: "), _differences(rule)),
        "LATE": _late(rule),
        "PENDING": F.lit("too early to judge: the next run judges this key again"),
    }
    result = F.lit(None).cast("string")
    for name, text in texts.items():
        result = F.when(F.col("class") == name, text).otherwise(result)
    return result


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


def _surplus_effects(rule: Rule) -> Column:
    count = F.lit(None).cast("bigint")
    for number, group in enumerate(rule.groups):
        count = F.when(F.col("group") == group.name, F.col(f"effects_{number}")).otherwise(count)
    messages = F.when(F.col("committed") == 1, "one message").otherwise(F.format_string("%d messages", "committed"))
    return F.format_string("%d effects of %s by %s", count, messages, "group")


def mismatched(rule: Rule) -> Column:
    """The columns that differ in a MISMATCH (array<string>), in the order of the rule; null for other classes."""
    names = [F.when(_differs(number, field), F.lit(field.column)) for number, field in enumerate(rule.fields)]
    listed = F.array_compact(F.array(*names)) if names else F.array().cast("array<string>")
    return F.when(F.col("class") == "MISMATCH", listed)


def _differs(number: int, field: FieldRule) -> Column:
    """Whether the rule's field `number` differs between row and body by more than its tolerance."""
    ours, theirs = F.col(f"row.v{number}"), F.col(f"about.v{number}")
    differs = ~ours.eqNullSafe(theirs)
    if field.tolerance is None:
        return differs
    distance = F.abs(ours.try_cast(NUMBER) - theirs.try_cast(NUMBER))
    return differs & F.coalesce(distance > F.lit(field.tolerance).cast(NUMBER), F.lit(True))


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
            between = _between(*(masking.shown(rule, field, _readable(value, field.type)) for value in (ours, theirs)))
        texts.append(F.when(differs, F.concat(F.lit(f"{field.column} "), *between)))
    return F.array_join(F.array_compact(F.array(*texts)), "; ") if texts else F.lit("")


def _shown_difference(ours: str | None, theirs: str | None, differs: bool | None) -> str | None:
    if not differs:
        return None
    in_row, in_body, note = _shown_bounded(ours, theirs)
    return f"{in_row} in the row, {in_body} in the body{f' ({note})' if note else ''}"


def _shown_bounded(ours: str | None, theirs: str | None) -> tuple[str, str, str]:
    """The result of `shown_difference` for two bounded texts. The note has the lengths of long texts."""
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
    return in_row, in_body, note


def _between(ours: Column, theirs: Column) -> list[Column]:
    absent = F.lit("null")
    return [F.coalesce(ours, absent), F.lit(" in the row, "), F.coalesce(theirs, absent), F.lit(" in the body")]


def _readable(value: Column, kind: FieldType) -> Column:
    if kind in (FieldType.DECIMAL, FieldType.INTEGER):
        text = F.regexp_replace(value, r"\.?0+$", "")
        for place, (name, *_) in NOT_FINITE.items():
            text = F.when(value == str(place), name).otherwise(text)
        return text
    return shown(value, kind)


def _unreadable() -> Column:
    is_damaged = F.col("damaged_log_id").isNotNull()
    of_message = F.when(
        is_damaged, F.concat(F.lit("message "), F.col("about.message_id"), F.lit(": "), F.col("about.why"))
    )
    of_row = F.when(F.col("row.why") != "", F.concat(F.lit("the row: "), F.col("row.why")))
    unkeyed = F.when(F.col("unkeyed") > 0, F.lit("the row's key is null"))
    texts = F.array_join(F.array_compact(F.array(unkeyed, of_message, of_row)), "; ")
    return F.when(texts != "", texts).otherwise("the body, or a compared field of the body, cannot be read")


def _late(rule: Rule) -> Column:
    of_message = F.concat(
        F.lit("the message was committed "), _span(F.unix_micros("settled_at") - F.unix_micros("row_at")),
        F.lit(" after the row's time; the limit is "), _span(_limit(rule.late_after_seconds or 0.0)),
    )  # fmt: skip
    text = of_message
    due = F.unix_micros(F.greatest("row_at", F.coalesce("due_at", "row_at")))
    for number, group in enumerate(rule.groups):
        late = F.concat(
            F.lit(f"the effect of {group.name} came "), _span(F.unix_micros(f"effect_at_{number}") - due),
            F.lit(" after it was due; the limit is "), _span(_limit(group.within_seconds)),
        )  # fmt: skip
        text = F.when(F.col("group") == group.name, late).otherwise(text)
    return text


def _limit(seconds: float) -> Column:
    return F.lit(round(seconds * 1_000_000)).cast("bigint")


def _span(microseconds: Column) -> Column:
    """A duration as h:mm:ss, followed by its milliseconds if they are not 0."""
    seconds = F.floor(microseconds / 1_000_000).cast("bigint")
    millis = F.floor((microseconds - seconds * 1_000_000) / 1000).cast("bigint")
    hours, rest = F.floor(seconds / 3600).cast("bigint"), seconds % 3600
    minutes = F.floor(rest / 60).cast("bigint")
    whole = F.format_string("%d:%02d:%02d", hours, minutes, rest % 60)
    return F.when(millis > 0, F.concat(whole, F.format_string(".%03d", millis))).otherwise(whole)
