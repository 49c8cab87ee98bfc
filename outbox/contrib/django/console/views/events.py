"""The pages of events: names, versions, fields, publishers, readers, and when each version was seen last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.operations import summary
from outbox.broker.operations.search import SeenEvent, seen_events
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import reading, required, text
from outbox.contrib.django.console.rendering import problem, render, sliced
from outbox.contrib.django.console.states import by_state
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.operations.contracts import declared_events
from outbox.contrib.django.operations.event_catalogue import LOOKED_AT, Event, list_events
from outbox.errors import ConfigurationError, InvalidSubscription

_STATES: Final[Mapping[str, tuple[str, Callable[[Event], bool]]]] = {
    "": ("All", lambda one: True),
    "seen": ("Seen", lambda one: one.last is not None),
    "unseen": ("Not seen", lambda one: one.last is None),
    "unknown": ("Unknown to this code", lambda one: one.has_unknown),
}


@seeing
def events(request: HttpRequest) -> HttpResponse:
    """The page of all events that this project declares, or that the newest messages name."""
    wanted = text(request.GET, "q") or ""
    try:
        every = _events()
    except (ConfigurationError, InvalidSubscription) as error:
        return _not_imported(request, error)
    rows, state, tabs = by_state(request, [one for one in every if wanted in one.name], _STATES)
    context = {
        "title": "Events",
        "page": sliced(request, rows),
        "is_used": bool(every),
        "state": state,
        "tabs": tabs,
        "given": request.GET,
        "looked_at": _looked_at(),
    }
    return render(request, "events", context)


@seeing
def event(request: HttpRequest) -> HttpResponse:
    """The page of one event: its readers, and the fields and an example of each version."""
    name = required(request.GET, "name")
    try:
        found = next((one for one in _events() if one.name == name), None)
    except (ConfigurationError, InvalidSubscription) as error:
        return _not_imported(request, error)
    if found is None:
        said = f"This project declares no event {name!r}, and no newest message names it."
        return problem(request, "No such event", said, status=404)
    return render(request, "event", {"title": f"Event {name}", "event": found, "looked_at": _looked_at()})


def _looked_at() -> int:
    """The number of newest messages in which the page has looked. RocketMQ has no list of them."""
    return 0 if is_on_rocketmq() else LOOKED_AT


def _events() -> list[Event]:
    declared = declared_events()
    seen: Sequence[SeenEvent] = ()
    groups: dict[str, list[str]] = {}
    if _looked_at():
        with reading() as run:
            seen = seen_events(run, newest=LOOKED_AT)
            for one in summary.read(run).groups:
                if not one.is_retry:
                    groups.setdefault(one.topic, []).append(one.group)
    return list_events(declared, seen, groups)


def _not_imported(request: HttpRequest, error: Exception) -> HttpResponse:
    return problem(request, "The events of this project cannot be imported", str(error), status=500)
