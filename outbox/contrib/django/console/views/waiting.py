"""The pages of waiting work: undecided transactions, delayed messages, and retries."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from outbox.broker.operations.listings import list_open, list_waiting
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import place, reading, text, uuid
from outbox.contrib.django.console.rendering import PER_PAGE, paged, render


@seeing
def undecided(request: HttpRequest) -> HttpResponse:
    """The page of undecided transactions, oldest first."""
    group, parked = text(request.GET, "group"), request.GET.get("parked") == "yes"
    with reading() as run:
        rows = list_open(run, group, parked=parked, after=uuid(request.GET, "after"), limit=PER_PAGE + 1)
    context = {
        "title": "Parked transactions" if parked else "Undecided transactions",
        "page": paged(request, rows, lambda one: {"after": one.transaction_id}),
        "group": group,
        "parked": parked,
    }
    return render(request, "undecided", context)


@seeing
def waiting(request: HttpRequest) -> HttpResponse:
    """The page of waiting messages. The message that is due next comes first."""
    given = request.GET
    group, topic, delayed = text(given, "group"), text(given, "topic"), given.get("delayed") == "yes"
    with reading() as run:
        rows = list_waiting(run, group, topic, delayed=delayed, after=place(given), limit=PER_PAGE + 1)
    context = {
        "title": "Messages that wait for their time",
        "page": paged(request, rows, lambda one: {"after": one.due_at.isoformat(), "after_id": one.schedule_id}),
        "group": group,
        "topic": topic,
        "delayed": delayed,
    }
    return render(request, "waiting", context)
