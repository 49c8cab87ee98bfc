"""The page of the income per minute."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from sample_project.income.models import ShownMinute

# The period that the page shows.
SHOWN = timedelta(hours=2)


@require_GET
@never_cache
def income_page(request: HttpRequest) -> HttpResponse:
    """The last hours as a plot and as a table."""
    minutes = list(ShownMinute.objects.filter(minute__gte=timezone.now() - SHOWN, revision__gt=0))
    return render(request, "storefront/income.html", {"minutes": minutes, "plot": _plot(minutes)})


def _plot(minutes: list[ShownMinute]) -> dict[str, list[Any]]:
    """Columns for the plot: seconds since 1970 and euro; a minute between two others without an order is 0."""
    by_minute = {minute.minute: float(minute.income) for minute in minutes}
    if not by_minute:
        return {"times": [], "income": []}
    first, last = min(by_minute), max(by_minute)
    times = [first + timedelta(minutes=step) for step in range(int((last - first) / timedelta(minutes=1)) + 1)]
    return {"times": [int(time.timestamp()) for time in times], "income": [by_minute.get(time, 0.0) for time in times]}
