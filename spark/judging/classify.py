"""Gives each key its class. The class depends only on the evidence, the rule and the window.

The functions of this module read no clock and no source. Each key gets one class for its message. If the key's row
exists and its message is committed, the key also gets one class per consumer group. If the conditions of several
classes hold, the key gets the first of these classes in the order of `FindingClass`. The column `flags` lists all
classes whose conditions hold and that are findings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from ..rules.rule import CLASSES, FAULTS, FieldRule, FindingClass, Rule
from ..sources.values import in_calendar
from .evidence import exact_places, near_places

# A row that is this much younger than the watermark has a wrong time, which may be years away.
_AHEAD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Window:
    """The interval of the rows that a run judges (`since <= time < until`). All sides are complete up to `watermark`.

    Lateness is judged against the watermark and not against a clock. So the same data and window always give the same
    classes. Retention may have removed the messages of rows before `floor`. If `is_exact` is true, no subject outside
    of the window is carried over to the next run. On the second look, `carried` is the name of a boolean column. A key
    with a true value in this column is judged at any age; a key with a false value is judged if its time is not before
    `floor`.
    """

    since: datetime | None
    until: datetime
    watermark: datetime
    floor: datetime | None = None
    is_exact: bool = False
    carried: str | None = None

    def covers(self, time: Column) -> Column:
        """Whether a time is inside the window; a null time is not."""
        return F.coalesce((time < F.lit(self.until)) & self.not_before(time), F.lit(False))

    def not_before(self, time: Column) -> Column:
        """Whether a time is not in an earlier window. An earlier run has judged the subjects of earlier windows, or has
        carried them over."""
        if self.carried is not None:
            return F.col(self.carried) | self._above_floor(time)
        return F.lit(True) if self.since is None else time >= F.lit(self.since)

    def looks_at(self, row_at: Column) -> Column:
        """Whether a row is judged: it is inside the window, or it is older and has a new message or effect."""
        if self.since is None or self.carried is not None:
            return self.covers(row_at)
        touched = (row_at < F.lit(self.since)) & self.meets() & self._above_floor(row_at)
        return self.covers(row_at) | F.coalesce(touched, F.lit(False))

    def meets(self) -> Column:
        """Whether a key has a new row, message or effect in this window, although its row and oldest message may be in
        an earlier window. Without `since`, and on the second look, the result is always false."""
        if self.since is None or self.carried is not None:
            return F.lit(False)
        return F.coalesce(F.col("touched_at") >= F.lit(self.since), F.lit(False))

    def to_come(self, time: Column) -> Column:
        """Whether a time is not in an earlier window; if `is_exact` is true, whether the time is inside this window."""
        return self.covers(time) if self.is_exact else self.not_before(time)

    def _above_floor(self, time: Column) -> Column:
        return F.lit(True) if self.floor is None else time >= F.lit(self.floor)


def message_conditions(rule: Rule, window: Window) -> dict[FindingClass, Column]:
    """For each class, the condition under which a key's message has this class, in order of precedence. A judged key
    that meets none of the conditions is OK."""
    has_row, committed, undecided = F.col("rows") > 0, F.col("committed") > 0, F.col("undecided") > 0
    row_judged = has_row & _judges_row(window)(F.col("row_at"))
    message_judged = ~has_row & window.covers(F.col("message_at"))
    settled = F.col("settled_at") < F.lit(window.until)
    half_judged = row_judged | (~has_row & window.covers(F.col("undecided_at")))
    age = F.unix_micros(F.lit(window.watermark)) - F.unix_micros("undecided_at")
    is_stuck = (F.col("parked") > 0) | (age > micros(rule.stuck_after_seconds))
    is_double = F.lit(not rule.has_several_messages) & (F.greatest(F.col("rows"), _live()) > 1)
    judged = row_judged | message_judged
    alone = ~has_row & ~committed & undecided & window.to_come(F.col("undecided_at"))
    unsettled = ~has_row & committed & ~settled & window.to_come(F.col("message_at"))
    is_erased = F.col("erased") > 0
    differs = row_judged & committed & (F.col("unreadable") == 0) & ~is_erased & _differs(rule)
    # If a row is written repeatedly, its newest message may belong to a later state of the row than the state that the
    # run has read. An undecided message may belong to the state that the run has read.
    is_final = F.lit(True)
    if rule.has_several_messages:
        is_final = (F.col("newest_settled_at") < F.lit(window.until)) & ~undecided
    conditions = {
        # The row of an erased message may have been deleted with the person's data, or have the erased key.
        FindingClass.ORPHAN: message_judged & committed & settled & ~is_erased,
        FindingClass.HALF_STUCK: half_judged & undecided & is_stuck,
        FindingClass.LOST: row_judged & ~committed & ~undecided,
        FindingClass.UNREADABLE: (judged & committed & (F.col("unreadable") > 0))
        | (row_judged & (F.col("unkeyed") > 0)),
        FindingClass.DUPLICATE: judged & committed & is_double,
        FindingClass.MISMATCH: differs & is_final,
        FindingClass.LATE: row_judged & committed & _is_late(rule),
        FindingClass.PENDING: (_is_fresh(window) & ~row_judged)
        | (row_judged & undecided)
        | (differs & ~is_final)
        | alone
        | unsettled,
        FindingClass.ERASED: judged & committed & is_erased,
    }
    return {name: F.coalesce(condition, F.lit(False)) for name, condition in conditions.items()}


def group_conditions(rule: Rule, number: int, window: Window) -> dict[FindingClass, Column]:
    """For each class, the condition under which a key has this class in the rule's group `number`."""
    group = rule.groups[number]
    effects, effect_at = F.col(f"effects_{number}"), F.col(f"effect_at_{number}")
    judges = _judges_row(window)
    has_table, is_sent = group.table is not None, _is_sent(judges)
    # A handler may do nothing for an erased message.
    is_owed = _is_owed(rule, number) & (F.col("erased") == 0)
    expected = is_sent & is_owed & (F.col(f"timed_out_{number}") < _live())
    due = F.greatest("row_at", F.coalesce("due_at", "row_at"))
    limit = micros(group.within_seconds)
    overdue = F.unix_micros(F.lit(window.watermark)) - F.unix_micros(due) > limit
    nothing_known = (F.col("rows") == 0) & (F.col("committed") == 0) & (F.col("undecided") == 0)
    is_compared = is_sent & (effects > 0) & (F.col("erased") == 0) & (F.col("unreadable") == 0)
    # No group may have an effect if all messages of the row were recalled before they were due.
    is_recalled = (F.col("rows") > 0) & judges(F.col("row_at")) & (F.col("recalled") > 0) & (_live() == 0)
    is_wrong, is_short = _sums(rule, number)
    one_unhandled, one_overdue = _of_several(rule, number)
    # A row that an earlier run judged, because it was far ahead, may be too close to be judged now. Its findings stay.
    waits = F.lit(False)
    if window.carried is not None:
        waits = F.col(window.carried) & _is_fresh(window) & ~judges(F.col("row_at"))
    conditions = {
        FindingClass.ORPHAN: nothing_known & (effects > 0) & window.covers(effect_at),
        FindingClass.DUPLICATE: (is_sent & (effects > _live()) & F.lit(not group.sum_effect))
        | (is_recalled & F.lit(has_table) & (effects > 0)),
        FindingClass.DEAD: (is_sent | (nothing_known & window.meets())) & (F.col(f"dead_{number}") > 0),
        FindingClass.UNDELIVERED: expected & (((effects == 0) & overdue) | one_overdue),
        FindingClass.WRONG_EFFECT: is_compared & _differs_in_effect(rule, number),
        FindingClass.WRONG_SUM: is_compared & is_wrong & (~is_short | overdue),
        # If a row has several messages, its time may be that of its last change.
        FindingClass.EARLY: is_sent & F.lit(has_table and not rule.has_several_messages) & _is_early(rule, effect_at),
        # A group without an effect table is judged by the broker's deliveries, which have no times.
        FindingClass.LATE: expected & F.lit(has_table) & (F.unix_micros(effect_at) - F.unix_micros(due) > limit),
        FindingClass.PENDING: (expected & (((effects == 0) & ~overdue) | one_unhandled))
        | (is_compared & is_wrong & is_short & ~overdue)
        | waits,
    }
    return {name: F.coalesce(condition, F.lit(False)) for name, condition in conditions.items()}


def _is_fresh(window: Window) -> Column:
    """Whether a row is after the window, so that a later run judges it."""
    return (F.col("rows") > 0) & (F.col("row_at") >= F.lit(window.until)) & F.lit(not window.is_exact)


def _judges_row(window: Window) -> Callable[[Column], Column]:
    """The condition under which a row with a given time is judged.

    A row after the window waits for a later run. It does not wait if its message is settled and its time is more than
    an hour after the watermark: this time is wrong, and may be years away.
    """

    def judges(row_at: Column) -> Column:
        if window.is_exact:
            return window.looks_at(row_at)
        is_ahead = F.unix_micros(row_at) - F.unix_micros(F.lit(window.watermark)) > micros(_AHEAD_SECONDS)
        is_settled = F.col("settled_at") < F.lit(window.until)
        return window.looks_at(row_at) | F.coalesce(is_ahead & is_settled, F.lit(False))

    return judges


def _is_early(rule: Rule, effect_at: Column) -> Column:
    """Whether the first effect is older than the row, or than the time at which its message was due.

    If a row has several messages, the first effect may belong to the first message. So it must be older than this one.
    """
    grace, effect = micros(rule.grace_seconds), F.unix_micros(effect_at)
    start = F.greatest("row_at", F.coalesce("first_due_at", "row_at"))
    is_before_all = (_live() == 1) | (F.unix_micros("message_at") - effect > grace)
    return (F.unix_micros(start) - effect > grace) & is_before_all


def _of_several(rule: Rule, number: int) -> tuple[Column, Column]:
    """Of a rule whose rows may have several messages: whether the group has not handled one of them, and whether the
    limit of such a message has passed.

    Effects with a message id name the message that was handled. One effect without it may be that of all messages, so a
    message is handled if an effect came after it. Several effects are one per message, and their numbers are compared.
    """
    if not rule.has_several_messages:
        return F.lit(False), F.lit(False)
    owing, overdue = F.col(f"owing_{number}"), F.col(f"overdue_{number}")
    if rule.groups[number].key is None:
        return owing > 0, overdue > 0
    effects, newest = F.col(f"effects_{number}"), F.col(f"newest_effect_{number}")
    handled = effects + F.col(f"timed_out_{number}")
    is_short = (effects > 0) & (handled < owing)
    return (
        is_short & ((effects > 1) | (F.col(f"newest_due_{number}") > newest)),
        is_short & (((effects > 1) & (handled < overdue)) | (F.col(f"newest_overdue_{number}") > newest)),
    )


def _differs_in_effect(rule: Rule, number: int) -> Column:
    """Whether an effect of the rule's group `number` has another value than the message."""
    differs = F.lit(False)
    if exact_places(rule, number):
        for name in ("least", "most"):
            differs = differs | ~F.col(f"{name}_e{number}_{number}").eqNullSafe(F.col(f"message_e{number}"))
    for place in near_places(rule, number):
        for name in ("least", "most"):
            ours = F.col(f"{name}_s{place}_{number}")
            differs = differs | _is_apart(ours, F.col(f"message_s{place}"), rule.fields[place])
    return differs


def _sums(rule: Rule, number: int) -> tuple[Column, Column]:
    """Whether the effects of the rule's group `number` do not add up to the message's value, and whether each wrong sum
    is too small, so that a part may still come."""
    is_wrong, is_short = F.lit(False), F.lit(True)
    for _, place in rule.groups[number].sum_effect:
        total, theirs = F.col(f"sum_s{place}_{number}"), F.col(f"message_s{place}")
        is_apart = _is_apart(total, theirs, rule.fields[place])
        is_wrong = is_wrong | is_apart
        is_short = is_short & (~is_apart | F.coalesce(F.abs(total) < F.abs(theirs), F.lit(True)))
    return is_wrong, is_short


def _is_apart(ours: Column, theirs: Column, field: FieldRule) -> Column:
    """Whether two numbers differ by more than the tolerance of their field."""
    too_far = F.abs(ours - theirs) > F.lit(field.tolerance or "0").cast("decimal(38,12)")
    return F.coalesce(too_far, ~ours.eqNullSafe(theirs))


def _is_sent(judges: Callable[[Column], Column]) -> Column:
    """Whether groups may owe an effect: the row is judged, and its message is committed and not recalled."""
    return (F.col("rows") > 0) & judges(F.col("row_at")) & (_live() > 0)


def _is_owed(rule: Rule, number: int) -> Column:
    """Whether the rule's group `number` owes an effect for at least one message of the key."""
    return F.col(f"owed_{number}") > 0 if rule.groups[number].owed_when else F.lit(True)


def _live() -> Column:
    """The number of committed messages that were not recalled."""
    return F.col("committed") - F.col("recalled")


def with_classes(evidence: DataFrame, rule: Rule, window: Window) -> DataFrame:
    """Add the columns `holds` and, per group, `holds_0`…: one bit for each condition that holds, in order of
    precedence.

    The value 0 means that the run had nothing to judge. Spark's optimizer copies the expression of a column to each of
    its uses. It can plan all copies of sums of bits, but not those of a chain of CASE for each class and group.
    """
    judged = (F.col("rows") > 0) & window.covers(F.col("row_at"))
    columns = {"holds": _bits(message_conditions(rule, window), judged)}
    for number in range(len(rule.groups)):
        expected = _is_sent(window.covers) & _is_owed(rule, number)
        columns[f"holds_{number}"] = _bits(group_conditions(rule, number, window), expected)
    return evidence.withColumns(columns)


def subjects(classified: DataFrame, rule: Rule, window: Window) -> DataFrame:
    """One row per key and subject that is not OK: key, group ('' for the message), class, flags, at, carry.

    `at` is the time of the subject. `carry` is true for a PENDING subject whose time is before the end of the window.
    No later window contains the time of this subject, so a subject with `carry` is carried over to the next run.
    """
    own = _subject("", "holds", F.coalesce("row_at", "message_at", "undecided_at"))
    groups = [
        _subject(group.name, f"holds_{number}", F.coalesce("row_at", "message_at", f"effect_at_{number}"))
        for number, group in enumerate(rule.groups)
    ]
    held = [F.col("holds"), *(F.col(f"holds_{number}") for number in range(len(rule.groups)))]
    # A subject for which only the bit of OK is set is no finding.
    found = reduce(Column.__or__, [(bits != 0) & (bits != _bit(FindingClass.OK)) for bits in held])
    exploded = classified.where(found).withColumn("subject", F.explode(F.array(own, *groups)))
    bits = F.col("subject.bits")
    first = F.bit_count((bits.bitwiseAND(-bits)) - 1)
    dropped = ["subject", "holds", *[f"holds_{number}" for number in range(len(rule.groups))]]
    named = exploded.where((bits != 0) & (bits != _bit(FindingClass.OK))).select(
        "*",
        "subject.group",
        F.element_at(_names(CLASSES), first + 1).alias("class"),
        F.filter(_names(FAULTS), lambda _, place: bits.bitwiseAND(F.pow(F.lit(2), place).cast("int")) != 0).alias(
            "flags"
        ),
        "subject.at",
    )
    carry = (F.col("class") == FindingClass.PENDING.value) & (F.col("at") < F.lit(window.until))
    return in_calendar(named.drop(*dropped).withColumn("carry", carry))


def _subject(group: str, bits: str, at: Column) -> Column:
    return F.struct(F.lit(group).alias("group"), F.col(bits).alias("bits"), at.alias("at"))


def _bits(conditions: dict[FindingClass, Column], judged: Column) -> Column:
    held = [F.when(condition, F.lit(_bit(name))).otherwise(0) for name, condition in conditions.items()]
    held.append(F.when(judged, F.lit(_bit(FindingClass.OK))).otherwise(0))
    return reduce(Column.__add__, held)


def _bit(name: FindingClass) -> int:
    return 1 << CLASSES.index(name)


def _names(classes: tuple[FindingClass, ...]) -> Column:
    return F.array(*[F.lit(name.value) for name in classes])


def _differs(rule: Rule) -> Column:
    """Whether the row differs from its message. A row with several messages differs if it is different from each
    message that may have been committed last."""
    if not rule.has_several_messages:
        return _differs_from("message", rule)
    by_decision = _differs_from("prompt", rule) & _differs_from("early", rule)
    return by_decision & ((F.col("in_log_order") == 0) | _differs_from("message", rule))


def _differs_from(message: str, rule: Rule) -> Column:
    differs = ~F.col("row_hash").eqNullSafe(F.col(f"{message}_hash"))
    for place in rule.near_places:
        differs = differs | _is_apart(F.col(f"row_s{place}"), F.col(f"{message}_s{place}"), rule.fields[place])
    return differs


def _is_late(rule: Rule) -> Column:
    if rule.late_after_seconds is None:
        return F.lit(False)
    return F.unix_micros("settled_at") - F.unix_micros("row_at") > micros(rule.late_after_seconds)


def micros(seconds: float) -> Column:
    """A duration in microseconds, as unix_micros has times."""
    return F.lit(round(seconds * 1_000_000)).cast("bigint")
