"""Conditions of data lost by a restore or a failover, from the last comparison with the application."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.operations.comparisons import ComparisonKind, DatabaseComparison, every
from outbox.broker.operations.conditions import Condition, Fact, Severity
from outbox.broker.operations.summary import Summary
from outbox.broker.operations.thresholds import Thresholds

_NAMES: Final = {
    ComparisonKind.LEDGER: "lost_messages",
    ComparisonKind.DECISION: "lost_commits",
    ComparisonKind.INBOX: "lost_effects",
}


def rules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return all conditions of this module."""
    found = [comparison for comparison in every(run) if not comparison.is_clean]
    for kind, name in _NAMES.items():
        facts = [(one.missing, _fact(one)) for one in found if one.kind is kind]
        if facts:
            count = sum(max(1, missing) for missing, _ in facts)
            yield Condition(name, Severity.CRITICAL, [fact for _, fact in facts], count)


def _fact(one: DatabaseComparison) -> Fact:
    fact: dict[str, str | int | float | None] = {
        ("group" if one.kind is ComparisonKind.INBOX else "producer_group"): one.subject,
        "database": one.alias,
        "missing": one.missing,
    }
    if one.missing:
        fact |= {"first": str(one.first_at), "last": str(one.last_at), "ids": ", ".join(map(str, one.ids))}
    if one.unproven_to is not None:
        fact |= {"unknown_from": str(one.unproven_from), "unknown_to": str(one.unproven_to)}
    if one.kind is ComparisonKind.INBOX:
        fact |= {"topic": one.topic, "command": reset_command(one)}
    return fact


def reset_command(one: DatabaseComparison) -> str:
    """Return the command that repeats a group's missing effects; the inbox skips the messages that it still knows."""
    assert one.first_at is not None
    # The time on a command line has whole microseconds.
    at = (one.first_at - timedelta(milliseconds=1)).isoformat()
    return f"manage.py outbox_group reset {one.subject} {one.topic} --to-time {at}"
