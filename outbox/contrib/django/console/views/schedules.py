"""The page of schedules: the last message and the next due moments of each schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.schedules.schedule import ScheduleRow, clock, list_schedules
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import reading
from outbox.contrib.django.console.rendering import render
from outbox.contrib.django.console.states import by_state

_UPCOMING: Final = 5
_LATE_SECONDS: Final = 60.0
_STATES: Final[Mapping[str, tuple[str, Callable[[tuple[ScheduleRow, float]], bool]]]] = {
    "": ("All", lambda row: True),
    "paused": ("Paused", lambda row: row[0].paused_at is not None),
    "failing": ("Failing", lambda row: bool(row[0].error)),
    "late": ("Late", lambda row: row[0].paused_at is None and row[1] > _LATE_SECONDS),
}


@seeing
def schedules(request: HttpRequest) -> HttpResponse:
    """The page of all schedules of all services on the broker."""
    with reading() as run:
        now, found = clock(run), list_schedules(run)
    every = [(one, one.late_seconds(now)) for one in found]
    chosen, state, tabs = by_state(request, every, _STATES)
    rows = [(one, one.upcoming(_UPCOMING), late) for one, late in chosen]
    context = {"title": "Schedules", "rows": rows, "state": state, "tabs": tabs, "is_used": bool(every)}
    return render(request, "schedules", context)
