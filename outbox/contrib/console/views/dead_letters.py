"""The page of dead letters, counted by group and error."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from outbox.broker.operations.listings import COUNTED, MOST_ERRORS, list_errors
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import reading, text
from outbox.contrib.console.rendering import render
from outbox.contrib.console.tabs import state_tabs


@seeing
def dead_letters(request: HttpRequest) -> HttpResponse:
    """The page with the errors of dead letters, most frequent first."""
    group = text(request.GET, "group")
    with reading() as run:
        tabs = state_tabs(run, group)
        errors = list_errors(run, group)
    context = {
        "title": "Dead letters",
        "errors": errors,
        "tabs": tabs,
        "state": "dead",
        "group": group,
        "counted": COUNTED,
        "cut_groups": sorted({one.group for one in errors if one.is_cut}),
        "most": MOST_ERRORS if len(errors) == MOST_ERRORS else None,
    }
    return render(request, "dead_letters", context)
