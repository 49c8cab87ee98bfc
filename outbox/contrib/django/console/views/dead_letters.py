"""The pages of dead letters: counted by group and error, and listed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse

from outbox.broker.operations.dead_letters import DeadLetter, LetterSelection, list_dead_letters
from outbox.broker.operations.listings import COUNTED, MOST_ERRORS, list_errors
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import place, reading, text
from outbox.contrib.django.console.rendering import PER_PAGE, paged, render
from outbox.contrib.django.console.states import state_tabs
from outbox.contrib.django.engine.operator_table import is_on_rocketmq


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


@seeing
def letters(request: HttpRequest) -> HttpResponse:
    """The page with a group's dead letters, newest first. Filters for the error, topic and key are optional."""
    given = request.GET
    selection = LetterSelection(
        topic=text(given, "topic"),
        key=text(given, "key"),
        error=text(given, "error"),
        error_type=text(given, "error_type"),
    )
    group, settled = text(given, "group"), given.get("settled") == "yes"
    page: dict[str, Any] = {"settled": settled, "after": place(given), "limit": PER_PAGE + 1}
    rows: Sequence[DeadLetter]
    if is_on_rocketmq():
        from outbox.contrib.django.operations.rocketmq import list_letters

        tabs, rows = None, list_letters(group, selection, **page)
    else:
        with reading() as run:
            tabs = state_tabs(run, group)
            rows = list_dead_letters(run, group, selection, **page)
    context = {
        "title": "Dead letters" + (f" of {group}" if group else ""),
        "page": paged(request, rows, lambda one: {"after": one.dead_at.isoformat(), "after_id": one.log_id}),
        "group": group,
        "selection": selection,
        "settled": settled,
        "tabs": tabs,
        "state": "dead",
    }
    return render(request, "letters", context)
