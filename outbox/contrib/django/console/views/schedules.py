"""The page of schedules: the last message and the next due moments of each schedule."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.schedules.schedule import clock, list_schedules
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import reading
from outbox.contrib.django.console.rendering import render

_UPCOMING: Final = 5


@seeing
def schedules(request: HttpRequest) -> HttpResponse:
    """The page of all schedules of all services on the broker."""
    with reading() as run:
        now, found = clock(run), list_schedules(run)
    rows = [(one, one.upcoming(_UPCOMING), one.late_seconds(now)) for one in found]
    return render(request, "schedules", {"title": "Schedules", "rows": rows})
