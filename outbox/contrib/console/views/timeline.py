"""The page of the timeline: which conditions held when, for how long, and for which subject."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone

from outbox.broker.operations.conditions import Severity, duration
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import application, number, text
from outbox.contrib.console.rendering import PER_PAGE, paged, render
from outbox.contrib.console.tabs import by_state, chosen_span, span_tabs
from outbox.contrib.django.operations.timeline import ConditionHistory, Span, Timeline, read_timeline
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.worker.periodic import CONDITIONS_INTERVAL_SECONDS

# A bar has this many units from left to right. Spans with a gap of less than NARROW units are drawn as one span, so the
# size of the page has a limit, however often a condition came and went.
WIDTH: Final = 1000
NARROW: Final = 10

_STATES: Final[Mapping[str, tuple[str, Callable[[ConditionHistory], bool]]]] = {
    "": ("All", lambda one: True),
    "holds": ("Holds now", lambda one: one.holds),
    "over": ("Over", lambda one: not one.holds),
}
_UNWATCHED: Final = "It is unknown which conditions held until now, because no worker records them"
_UNKNOWN: Final = "It is unknown which conditions hold, because the broker does not answer and no worker records them"
_GROUP: Final = re.compile(r"(?:^|, )group ([^,]+)")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the timeline: the bar as paths of SVG by severity, and the same in words."""

    history: ConditionHistory
    severity: str
    paths: Mapping[str, str]
    label: str
    seconds: float
    last: Span
    # The time at which the condition was over; None if it holds, and if no pass watched when it ended.
    over_by: datetime | None
    group_url: str


@seeing
def timeline(request: HttpRequest) -> HttpResponse:
    """The page of all conditions that held in the chosen span of time."""
    span, wanted, after = chosen_span(request), text(request.GET, "q") or "", number(request.GET, "after") or 0
    report = look().verdict
    until = timezone.now()
    with application():
        found = read_timeline(until - timedelta(seconds=span.seconds), until, containing=wanted, report=report)
    histories, state, tabs = by_state(request, found.histories, _STATES)
    rows = [_row(one, found) for one in histories[after : after + PER_PAGE + 1]]
    context = {
        "title": "Timeline",
        "page": paged(request, rows, lambda _: {"after": after + PER_PAGE}),
        "timeline": found,
        "unwatched": _path(found.unwatched, found),
        "width": WIDTH,
        "wanted": wanted,
        "state": state,
        "span": span,
        "spans": span_tabs(request, span),
        "tabs": tabs,
        "said": _sentence(found),
        "missing": "" if found.is_watched else _UNWATCHED if found.is_present else _UNKNOWN,
    }
    return render(request, "timeline", context)


def _sentence(found: Timeline) -> str:
    count = sum(one.holds for one in found.histories)
    if not (found.is_present or found.is_watched):
        return _UNKNOWN
    return "No condition holds" if not count else f"{count} condition{'s hold' if count > 1 else ' holds'} now"


def _row(history: ConditionHistory, found: Timeline) -> Row:
    last = history.spans[-1]
    seconds = sum((one.ended_at - max(one.began_at, found.since)).total_seconds() for one in history.spans)
    times = "once" if len(history.spans) == 1 else f"{len(history.spans)} times"
    group = _GROUP.search(history.subject)
    return Row(
        history=history,
        severity=history.severity.name.lower(),
        paths={
            severity.name.lower(): _path(
                [(one.began_at, one.ended_at) for one in history.spans if one.severity is severity], found
            )
            for severity in (Severity.WARNING, Severity.CRITICAL)
        },
        label=f"{history.name} {history.subject}: {times}, for {duration(seconds)} in all",
        seconds=seconds,
        last=last,
        over_by=_over_by(last, found),
        group_url=f"{reverse('outbox:group')}?{urlencode({'name': group[1]})}" if group else "",
    )


def _over_by(last: Span, found: Timeline) -> datetime | None:
    """The time of the first pass that did not see the condition any more.

    An operator may have ended it after it was last seen, so both times are shown.
    """
    at = min(found.until, min(found.until, last.ended_at) + timedelta(seconds=CONDITIONS_INTERVAL_SECONDS))
    return None if last.holds or any(began <= at < ended for began, ended in found.unwatched) else at


def _path(spans: Iterable[tuple[datetime, datetime]], found: Timeline) -> str:
    """The spans as the path of a line: "M10 0h25" begins at 10 and is 25 units long."""
    return "".join(f"M{left} 0h{right - left}" for left, right in _merged(list(_units(spans, found))))


def _units(spans: Iterable[tuple[datetime, datetime]], found: Timeline) -> Iterator[tuple[int, int]]:
    whole = (found.until - found.since).total_seconds()
    for began, ended in spans:
        left, right = (
            min(WIDTH, max(0, round((at - found.since).total_seconds() / whole * WIDTH))) for at in (began, ended)
        )
        # The shortest span is visible too.
        left = min(left, WIDTH - 2)
        yield left, max(right, left + 2)


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for left, right in sorted(spans):
        if found and left - found[-1][1] < NARROW:
            found[-1] = (found[-1][0], max(found[-1][1], right))
        else:
            found.append((left, right))
    return found
