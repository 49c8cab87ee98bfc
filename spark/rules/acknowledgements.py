"""Findings that people know of: reported as such until a date, and not counted as new ones.

They change nothing of how a key is judged: they apply to what a run has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS: Final = ("rule", "key", "group", "class", "until", "reason", "by")
_SUBJECT: Final = ("rule", "key", "group")
_SCHEMA: Final = "rule string, key string, of_group string, class string, acknowledged string"


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgement:
    """`group`: None for every subject of the key, '' for its message. `until`: it is in force before that moment."""

    rule: str
    key: str
    finding_class: str
    group: str | None
    until: datetime
    reason: str
    by: str

    @property
    def text(self) -> str:
        """As findings show it."""
        return f"by {self.by} until {self.until.isoformat()}: {self.reason}"


class Fault(StrEnum):
    """The classes that can be acknowledged."""

    ORPHAN = "ORPHAN"
    HALF_STUCK = "HALF_STUCK"
    LOST = "LOST"
    UNREADABLE = "UNREADABLE"
    DUPLICATE = "DUPLICATE"
    DEAD = "DEAD"
    UNDELIVERED = "UNDELIVERED"
    MISMATCH = "MISMATCH"
    LATE = "LATE"


class RulesTable(Protocol):
    """A table of the rules file while it is read (rules_file)."""

    values: dict[str, Any]

    def problem(self, key: str | None, what: str, remedy: str) -> None:
        """Note an error at the key's line."""

    def required(self, key: str) -> str:
        """A text that must be there."""

    def choice(self, key: str, kind: type[Fault], default: Fault) -> Fault:
        """One of the kind's values."""


def read(table: RulesTable, rules: Sequence[str]) -> Acknowledgement:
    """An `[[acknowledge]]`; `rules` are the names of the file's rules."""
    rule, until = table.required("rule"), table.values.get("until")
    if rule and rule not in rules:
        table.problem("rule", f"no rule {rule!r}", f"use one of: {', '.join(rules)}")
    group = table.values.get("group")
    if group is not None and not isinstance(group, str):
        table.problem("group", f"must be a text, got {group!r}", "write group = \"…\", or '' for the message")
    if "class" not in table.values:
        table.problem("class", "missing", 'write class = "LATE"')
    moment = _moment(until)
    if moment is None:
        table.problem("until", f"not a date: {until!r}", "write until = 2025-12-31 (to the end of that day, UTC)")
    return Acknowledgement(
        rule=rule,
        key=table.required("key"),
        finding_class=table.choice("class", Fault, Fault.LATE).value,
        group=group if isinstance(group, str) else None,
        until=moment or datetime.min.replace(tzinfo=UTC),
        reason=table.required("reason"),
        by=table.required("by"),
    )


def _moment(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value
    if isinstance(value, date):
        return datetime.combine(value + timedelta(days=1), time(), UTC)
    return None


def in_force(given: Sequence[Acknowledgement], now: datetime) -> list[Acknowledgement]:
    """Those that have not ended."""
    return [each for each in given if now < each.until]


def ended(given: Sequence[Acknowledgement], rule: str, now: datetime) -> list[str]:
    """What is to be said of those of a rule that have ended."""
    return [
        f"the acknowledgement of {each.finding_class} {each.key!r} by {each.by} ended at {each.until.isoformat()}: it "
        f"counts again. Remove it, or give it another until"
        for each in given
        if each.rule == rule and each.until <= now
    ]


def applied(spark: SparkSession, findings: DataFrame, given: Sequence[Acknowledgement]) -> DataFrame:
    """The findings with `acknowledged`: by whom, until when and why; null where nobody did."""
    from pyspark.sql import functions as F

    if not given:
        return findings.withColumn("acknowledged", F.lit(None).cast("string"))
    rows = [(each.rule, each.key, each.group, each.finding_class, each.text) for each in given]
    known = F.broadcast(spark.createDataFrame(rows, _SCHEMA)).alias("known")
    found = findings.alias("found")
    same = [F.col(f"found.{name}") == F.col(f"known.{name}") for name in ("rule", "key", "class")]
    of_group = F.col("known.of_group").isNull() | (F.col("known.of_group") == F.col("found.group"))
    # More than one may fit a finding; no row may come twice.
    matched = found.join(known, [*same, of_group], "left").groupBy(*(f"found.{name}" for name in _SUBJECT))
    texts = matched.agg(F.max("known.acknowledged").alias("acknowledged"))
    return findings.join(texts, list(_SUBJECT), "left")
