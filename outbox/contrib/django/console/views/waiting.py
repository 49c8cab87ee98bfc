"""The pages of waiting work: undecided transactions, delayed messages, and retries."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.operations.listings import list_open, list_retry_errors, list_waiting
from outbox.broker.transaction.turns import silent_groups
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import place, reading, text, uuid
from outbox.contrib.django.console.rendering import PER_PAGE, paged, render
from outbox.contrib.django.console.states import state_tabs

_ERRORS: Final = 10
# The titles of the page of waiting messages, by the filters (delayed, retrying).
_TITLES: Final = {
    (False, False): "Messages that wait for their time",
    (True, False): "Delayed messages",
    (False, True): "Messages that are retried",
}


@seeing
def undecided(request: HttpRequest) -> HttpResponse:
    """The page of undecided transactions, oldest first."""
    group, parked = text(request.GET, "group"), request.GET.get("parked") == "yes"
    with reading() as run:
        tabs = state_tabs(run)
        rows = list_open(run, group, parked=parked, after=uuid(request.GET, "after"), limit=PER_PAGE + 1)
        silent = silent_groups(run, [one.transaction_id for one in rows])
    context = {
        "title": "Parked transactions" if parked else "Undecided transactions",
        "page": paged(request, rows, lambda one: {"after": one.transaction_id}),
        "group": group,
        "parked": parked,
        "tabs": tabs,
        "state": "parked" if parked else "undecided",
        "silent": silent,
        "silent_names": ", ".join(silent),
    }
    return render(request, "undecided", context)


@seeing
def waiting(request: HttpRequest) -> HttpResponse:
    """The page of waiting messages. The message that is due next comes first."""
    given = request.GET
    group, topic, delayed = text(given, "group"), text(given, "topic"), given.get("delayed") == "yes"
    retrying = given.get("retrying") == "yes" and not delayed
    with reading() as run:
        tabs = state_tabs(run, group)
        rows = list_waiting(
            run, group, topic, delayed=delayed, retrying=retrying, after=place(given), limit=PER_PAGE + 1
        )
        errors = list_retry_errors(run, group) if retrying and rows and "after" not in given else []
    context = {
        "title": _TITLES[delayed, retrying],
        "page": paged(request, rows, lambda one: {"after": one.due_at.isoformat(), "after_id": one.schedule_id}),
        "group": group,
        "topic": topic,
        "delayed": delayed,
        "retrying": retrying,
        "errors": errors[:_ERRORS],
        "tabs": tabs,
        "state": "delayed" if delayed else "retrying" if retrying else "",
    }
    return render(request, "waiting", context)
