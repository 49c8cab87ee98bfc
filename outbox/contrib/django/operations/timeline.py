"""The history of conditions: since when each condition holds, when it held before, and when no pass has watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q

from outbox.broker.operations.conditions import ConditionReport, Severity
from outbox.contrib.django.models import PastCondition, RaisedCondition
from outbox.contrib.django.operations.raised import CLEAR_SECONDS, by_subject


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a condition held with at most this severity. `holds`: it holds at the end of the timeline."""

    severity: Severity
    began_at: datetime
    ended_at: datetime
    holds: bool = False


@dataclass(frozen=True, slots=True)
class ConditionHistory:
    """The spans of one condition for one subject, the oldest first."""

    name: str
    subject: str
    spans: Sequence[Span]

    @property
    def holds(self) -> bool:
        """Whether the condition holds at the end of the timeline."""
        return self.spans[-1].holds

    @property
    def severity(self) -> Severity:
        """The highest severity of all spans."""
        return max(one.severity for one in self.spans)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The conditions that held between `since` and `until`. A condition that holds comes first, then the latest.

    `unwatched` has the times in which no pass ran, so it is unknown which conditions held. `watched_at` is the time of
    the last pass; None if no pass has ever run. `is_present`: what holds at the end comes from a complete report, else
    from the last pass.
    """

    since: datetime
    until: datetime
    histories: Sequence[ConditionHistory]
    unwatched: Sequence[tuple[datetime, datetime]]
    watched_at: datetime | None
    is_present: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether a pass has run shortly before the end of the timeline."""
        return _is_recent(self.watched_at, self.until)


def read_timeline(
    since: datetime, until: datetime, *, containing: str = "", report: ConditionReport | None = None
) -> Timeline:
    """Read the timeline. With `containing`, only conditions whose name or subject contains this text.

    `report`: the conditions that hold at `until`. The stored rows alone would show a condition for CLEAR_SECONDS after
    its end, and would not show a condition that has begun since the last pass. Raises Django's DatabaseError.
    """
    wanted = Q(name__icontains=containing) | Q(subject__icontains=containing)
    present = list(RaisedCondition.objects.filter(kind=RaisedCondition.Kind.CONDITION).filter(wanted))
    # There may be many rows, so the statement makes no object for each of them.
    past = (
        PastCondition.objects.filter(seen_at__gte=since)
        .exclude(name="")
        .filter(wanted)
        .order_by("raised_at")
        .values_list("name", "subject", "severity", "raised_at", "seen_at")
    )
    passes = list(PastCondition.objects.filter(seen_at__gte=since, name="").order_by("raised_at"))
    running = RaisedCondition.objects.filter(kind=RaisedCondition.Kind.PASS).first()
    watched = [(one.raised_at, one.seen_at) for one in passes]
    if running is not None:
        watched.append((running.raised_at, running.seen_at))
    seen_at = running.seen_at if running is not None else None
    is_watched = _is_recent(seen_at, until)
    is_present = report is not None and report.is_complete
    holding, unsure = by_subject(report.conditions) if report is not None else ({}, set())
    found: dict[tuple[str, str], list[Span]] = {}
    severities = {int(one): one for one in Severity}
    for name, subject, severity, began_at, ended_at in past:
        found.setdefault((name, subject), []).append(Span(severities[severity], began_at, ended_at))
    for held in present:
        key = (held.name, held.subject)
        holds = key in holding or (held.name in unsure if is_present else True)
        ended_at = until if is_watched and holds else held.seen_at
        if ended_at >= since:
            span = Span(Severity(max(held.worst, held.severity)), held.raised_at, ended_at, holds=ended_at == until)
            found.setdefault(key, []).append(span)
    for (name, subject), one in holding.items():
        spans = found.get((name, subject), [])
        is_wanted = containing.lower() in name.lower() or containing.lower() in subject.lower()
        if is_wanted and not (spans and spans[-1].holds):
            found[name, subject] = [*spans, Span(one.severity, until, until, holds=True)]
    histories = [ConditionHistory(name, subject, spans) for (name, subject), spans in found.items()]
    histories.sort(key=lambda one: (not one.holds, -one.spans[-1].ended_at.timestamp(), one.name, one.subject))
    return Timeline(since, until, histories, list(_between(watched, since, until)), seen_at, is_present)


def _is_recent(seen_at: datetime | None, until: datetime) -> bool:
    return seen_at is not None and until - seen_at <= timedelta(seconds=CLEAR_SECONDS)


def _between(
    watched: Iterable[tuple[datetime, datetime]], since: datetime, until: datetime
) -> Iterator[tuple[datetime, datetime]]:
    """The times between the watched ones. The time since a recent pass is not one of them."""
    at = since
    for began, ended in watched:
        if began > at:
            yield at, min(began, until)
        at = max(at, ended)
    if until - at > timedelta(seconds=CLEAR_SECONDS):
        yield at, until
