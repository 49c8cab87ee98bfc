"""Undecided transactions: open ones that are not checked yet, and parked ones."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from outbox.broker.operations.open_transactions import list_open
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import reading, text, uuid
from outbox.contrib.django.console.rendering import PER_PAGE, paged, render


@seeing
def undecided(request: HttpRequest) -> HttpResponse:
    """Undecided transactions, oldest first."""
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
