"""Histories of one key and, in plain Python, the class that each must get: written from the docs, not from the code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from spark.rules.rule import FieldRule, FieldType, GroupRule, Messages, Rule

UNTIL = datetime(2025, 6, 1, 12, tzinfo=UTC)
GRACE = timedelta(seconds=30)
WATERMARK = UNTIL + GRACE
SINCE = UNTIL - timedelta(hours=6)
LATE_AFTER = timedelta(minutes=5)
STUCK_AFTER = timedelta(minutes=15)
WITHIN = timedelta(minutes=10)
GROUPS = ("logistics", "points")
PRECEDENCE = (
    "ORPHAN",
    "HALF_STUCK",
    "LOST",
    "UNREADABLE",
    "DUPLICATE",
    "DEAD",
    "UNDELIVERED",
    "MISMATCH",
    "EARLY",
    "LATE",
    "PENDING",
    "OK",
)


def rule(messages: Messages = Messages.EXACTLY_ONE) -> Rule:
    return Rule(
        name="order-paid",
        database="app",
        table="orders_order",
        key="id",
        time="paid_at",
        topic="order.paid",
        messages=messages,
        grace_seconds=GRACE.total_seconds(),
        late_after_seconds=LATE_AFTER.total_seconds(),
        stuck_after_seconds=STUCK_AFTER.total_seconds(),
        fields=(
            FieldRule(column="customer", body="customer"),
            FieldRule(column="total", body="price.total", type=FieldType.DECIMAL),
            FieldRule(column="weight", body="weight", type=FieldType.DECIMAL, tolerance="0.5"),
        ),
        groups=tuple(
            GroupRule(name=name, database="app", table=name, key="k", time="t", within_seconds=WITHIN.total_seconds())
            for name in GROUPS
        ),
    )


@dataclass(frozen=True, kw_only=True)
class BusinessRow:
    at: datetime
    customer: str | None = "ann"
    total: Decimal = Decimal("12.50")
    weight: Decimal | None = Decimal("1.0")


@dataclass(frozen=True, kw_only=True)
class Sent:
    stored_at: datetime
    state: str = "committed"
    decided_at: datetime | None = None
    decided_by: str = "P"
    deliver_at: datetime | None = None
    customer: str | None = "ann"
    total: Decimal = Decimal("12.50")
    weight: Decimal | None = Decimal("1.0")
    damage: bytes | None = None

    @property
    def body(self) -> bytes:
        if self.damage is not None:
            return self.damage
        price = {"total": str(self.total)}
        weight = None if self.weight is None else float(self.weight)
        return json.dumps({"customer": self.customer, "price": price, "weight": weight}).encode()

    @property
    def settled_at(self) -> datetime:
        return max(self.stored_at, self.decided_at or self.stored_at)

    @property
    def is_committed(self) -> bool:
        return self.state in ("committed", "recalled")

    @property
    def is_undecided(self) -> bool:
        return self.state in ("undecided", "parked")

    @property
    def is_readable(self) -> bool:
        return self.damage is None


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that happened with one key. `effects` and `dead`: per group of GROUPS."""

    rows: tuple[BusinessRow, ...] = ()
    messages: tuple[Sent, ...] = ()
    effects: tuple[tuple[datetime, ...], ...] = field(default=((), ()))
    dead: tuple[bool, ...] = (False, False)


def in_window(at: datetime) -> bool:
    return SINCE <= at < UNTIL


def message_flags(history: History, kind: Messages = Messages.EXACTLY_ONE) -> set[str]:
    """All classes that hold for the message of a key; empty when it is not judged here."""
    rows = history.rows
    committed = [message for message in history.messages if message.is_committed]
    undecided = [message for message in history.messages if message.is_undecided]
    if rows:
        at = min(row.at for row in rows)
        if at >= UNTIL:
            if not is_ahead(history):
                return {"PENDING"}
            return _flags_with_row(at, rows, committed, undecided, kind) - {"OK"}
        if not in_window(at) and not is_touched(history):
            return set()
        flags = _flags_with_row(at, rows, committed, undecided, kind)
        return flags if in_window(at) else flags - {"OK"}
    flags = set()
    if committed:
        stored, settled = min(m.stored_at for m in committed), min(m.settled_at for m in committed)
        if in_window(stored):
            flags |= {"ORPHAN"} if settled < UNTIL else set()
            flags |= {"UNREADABLE"} if any(not m.is_readable for m in committed) else set()
            flags |= {"DUPLICATE"} if kind is Messages.EXACTLY_ONE and len(live(committed)) > 1 else set()
        if stored >= SINCE and settled >= UNTIL:
            flags.add("PENDING")
    if undecided:
        oldest = min(m.stored_at for m in undecided)
        if in_window(oldest) and _is_stuck(undecided, oldest):
            flags.add("HALF_STUCK")
        if not committed and oldest >= SINCE:
            flags.add("PENDING")
    return flags


def _flags_with_row(
    at: datetime, rows: Sequence[BusinessRow], committed: list[Sent], undecided: list[Sent], kind: Messages
) -> set[str]:
    flags = {"OK"}
    if undecided:
        if _is_stuck(undecided, min(m.stored_at for m in undecided)):
            flags.add("HALF_STUCK")
        flags.add("PENDING")
    if not committed:
        return flags if undecided else flags | {"LOST"}
    if any(not m.is_readable for m in committed):
        flags.add("UNREADABLE")
    elif all(_differs(rows[0], message) for message in may_be_last(committed, kind)):
        is_final = kind is Messages.EXACTLY_ONE or (max(m.settled_at for m in committed) < UNTIL and not undecided)
        flags.add("MISMATCH" if is_final else "PENDING")
    if kind is Messages.EXACTLY_ONE and max(len(live(committed)), len(rows)) > 1:
        flags.add("DUPLICATE")
    if min(m.settled_at for m in committed) - at > LATE_AFTER:
        flags.add("LATE")
    return flags


def may_be_last(committed: Sequence[Sent], kind: Messages) -> list[Sent]:
    """The messages that may have been committed last, in the order of the log."""
    known = live(committed) or committed
    atomic = [m for m in committed if m.decided_at is None or m.decided_at <= m.stored_at]
    if kind is Messages.EXACTLY_ONE or len(atomic) == len(committed):
        return [known[-1]]

    never = datetime.min.replace(tzinfo=UTC)

    def decided(message: Sent) -> datetime:
        return never if message in atomic else message.settled_at

    def earliest(message: Sent) -> datetime:
        return decided(message) if message.decided_by == "P" else min(decided(message), message.stored_at)

    places = dict(enumerate(known))
    found = [known[max(places, key=lambda n: (time(places[n]), n))] for time in (decided, earliest)]
    return [*found, *([known[-1]] if atomic else [])]


def live(committed: Sequence[Sent]) -> list[Sent]:
    """Those that were not recalled."""
    return [message for message in committed if message.state == "committed"]


def is_touched(history: History) -> bool:
    """Whether something new came to a row of an earlier window; dead letters of these histories are of today."""
    moments = [message.settled_at for message in history.messages if message.is_committed or message.is_undecided]
    moments += [at for effects in history.effects for at in effects] + [row.at for row in history.rows]
    return any(history.dead) or any(at >= SINCE for at in moments)


def is_ahead(history: History) -> bool:
    """Whether the row's time is more than an hour after the watermark, although its message is settled."""
    settled = min((message.settled_at for message in history.messages if message.is_committed), default=UNTIL)
    at = min(row.at for row in history.rows)
    return settled < UNTIL and at - WATERMARK > timedelta(hours=1)


def _is_stuck(undecided: Sequence[Sent], oldest: datetime) -> bool:
    return any(m.state == "parked" for m in undecided) or WATERMARK - oldest > STUCK_AFTER


def _differs(row: BusinessRow, message: Sent) -> bool:
    if (row.customer, row.total) != (message.customer, message.total):
        return True
    if row.weight is None or message.weight is None:
        return row.weight is not message.weight
    return abs(row.weight - message.weight) > Decimal("0.5")


def group_flags(history: History, number: int, kind: Messages = Messages.EXACTLY_ONE) -> set[str]:
    """All classes that hold for a key with one consumer group."""
    committed = [message for message in history.messages if message.is_committed]
    undecided = [message for message in history.messages if message.is_undecided]
    effects = history.effects[number]
    if not history.rows:
        if committed or undecided:
            return set()
        # The dead letter of an older message: looked up by key.
        return ({"ORPHAN"} if effects and in_window(min(effects)) else set()) | (
            {"DEAD"} if history.dead[number] else set()
        )
    at = min(row.at for row in history.rows)
    sent = len(live(committed))
    is_judged = is_ahead(history) if at >= UNTIL else in_window(at) or is_touched(history)
    if not committed or not is_judged:
        return set()
    if not sent:
        # All messages were recalled before they were due.
        return {"DUPLICATE"} if effects else set()
    dues = [m.deliver_at or at for m in live(committed)]
    due = max([at, *dues])
    flags = {"OK"} if in_window(at) else set()
    if history.dead[number]:
        flags.add("DEAD")
    if not effects:
        flags.add("UNDELIVERED" if WATERMARK - due > WITHIN else "PENDING")
        return flags
    if len(effects) > sent:
        flags.add("DUPLICATE")
    if kind is Messages.AT_LEAST_ONE and len(effects) < sent:
        starts = [max(m.stored_at, m.deliver_at or m.stored_at) for m in live(committed)]
        later = [at for at in starts if at > max(effects)]
        overdue = sum(WATERMARK - at > WITHIN for at in starts)
        is_lost = len(effects) > 1 and len(effects) < overdue
        if is_lost or any(WATERMARK - at > WITHIN for at in later):
            flags.add("UNDELIVERED")
        elif later or len(effects) > 1:
            flags.add("PENDING")
    is_before_all = sent == 1 or min(m.stored_at for m in committed) - min(effects) > GRACE
    if kind is Messages.EXACTLY_ONE and max(at, min(dues)) - min(effects) > GRACE and is_before_all:
        flags.add("EARLY")
    if min(effects) - due > WITHIN:
        flags.add("LATE")
    return flags


def first(flags: set[str]) -> str | None:
    """The class that names a finding."""
    return next((name for name in PRECEDENCE if name in flags), None)


def expected(history: History, kind: Messages = Messages.EXACTLY_ONE) -> Iterator[tuple[str, str]]:
    """(subject, class) of everything about a key that is not OK."""
    found = first(message_flags(history, kind))
    if found not in (None, "OK"):
        yield "", str(found)
    for number, name in enumerate(GROUPS):
        found = first(group_flags(history, number, kind))
        if found not in (None, "OK"):
            yield name, str(found)
