"""The page of a declared listing: tabs, filters, the table, and the way to its next page."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import application, reading, text, values_of
from outbox.contrib.console.rendering import PER_PAGE, paged, render, sliced
from outbox.contrib.console.tabs import by_state, state_tabs
from outbox.contrib.django.actions.listing import Asked, Listing
from outbox.contrib.django.catalogue import ACTIONS, on_engine


def view_of(listing: Listing) -> Callable[..., HttpResponse]:
    """The view of the page of a listing."""

    @seeing
    def view(request: HttpRequest) -> HttpResponse:
        return shown(request, on_engine(listing))

    return view


def shown(request: HttpRequest, listing: Listing) -> HttpResponse:
    """The page of a listing with the rows that the parameters of the request ask for. Raises UsageError."""
    fields = [*listing.fields, *([listing.after] if listing.after else [])]
    values = {**values_of(fields, request.GET), "state": text(request.GET, "state") or ""}
    asked = Asked(values, PER_PAGE + 1, reading, application)
    state = listing.tab(values) if callable(listing.tab) else listing.tab
    with listing.opened(asked) as run:
        rows = listing.read(run, asked)
        context = {**listing.notes(run, asked, rows)} if listing.notes else {}
        tabs = state_tabs(run, values.get(listing.tab_group)) if state and run else []
    is_used = bool(rows)
    if listing.states:
        rows, state, tabs = by_state(request, rows, listing.states)
    filters = [(one, request.GET.get(one.name, "")) for one in listing.fields if one.on_page and not one.by_tab]
    passed_on = [(one.name, request.GET.get(one.name, "")) for one in listing.fields if one.by_tab]
    position = listing.position
    choice = listing.choice
    context |= {
        "title": listing.title(values) if callable(listing.title) else listing.title,
        "listing": listing,
        "page": paged(request, rows, lambda one: {"after": position(one)}) if position else sliced(request, rows),
        "asked": values,
        "is_used": is_used,
        "empty": listing.empty if is_used or not listing.unused else listing.unused,
        "tabs": tabs,
        "state": state,
        "of": listing.name if listing.states else "messages",
        "filters": filters,
        "filtered": ", ".join(f"{one.title.lower()} {value}" for one, value in filters if value),
        "passed_on": [one for one in [*passed_on, ("state", state if listing.states else "")] if one[1]],
        "choice": choice if choice and (not choice.needs or values[choice.needs]) else None,
        "could_choose": choice is not None,
        "forms": [one for one in ACTIONS.values() if one.form and one.form.listing == listing.name],
    }
    return render(request, listing.template, context)
