"""The pages of events: names, versions, fields, publishers, readers, and when each version was seen last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from outbox.broker.operations import summary
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import reading, required
from outbox.contrib.console.rendering import problem, render
from outbox.contrib.console.views.listing import shown
from outbox.contrib.django.actions.cells import badge, group_link, joined, link, topic_link
from outbox.contrib.django.actions.declaration import Field
from outbox.contrib.django.actions.listing import Column, Listing, States
from outbox.contrib.django.operations.contracts import declared_events
from outbox.contrib.django.operations.event_catalogue import (
    LOOKED_AT,
    Event,
    EventVersion,
    SeenEvent,
    list_events,
    seen_events,
)
from outbox.contrib.django.operations.known_conditions import observer
from outbox.errors import ConfigurationError, InvalidSubscription


def _version(one: EventVersion) -> SafeString:
    if one.state == "unknown to this code":
        return badge(f"{one.number or 'not a number,'} unknown", "warn")
    return badge(str(one.number), "good" if one.state == "published" else "plain")


def _last_seen(one: Event) -> object:
    if one.last is None:
        return None
    number = one.last.number or "not a number"
    return [link(one.last.last_at, "message", one.last.last_message_id), f"version {number}"]


_STATES: Final[States] = {
    "": ("All", lambda one: True),
    "seen": ("Seen", lambda one: one.last is not None),
    "unseen": ("Not seen", lambda one: one.last is None),
    "unknown": ("Unknown to this code", lambda one: one.has_unknown),
}
EVENTS: Final = Listing(
    "events",
    (
        Column("Event", lambda one: link(one.name, "event", name=one.name), "head"),
        Column("Topic", lambda one: joined(list(map(topic_link, one.topics)))),
        Column("Versions", lambda one: list(map(_version, one.versions))),
        Column("Published by", lambda one: joined(one.publishers)),
        Column("Groups", lambda one: joined([group_link(reader.group) for reader in one.readers], nothing="none")),
        Column("Last seen", _last_seen),
    ),
    lambda run, asked: [one for one in _events() if (asked["q"] or "") in one.name],
    of_broker=False,
    fields=(Field("q", "only events whose name contains this", label="Name contains"),),
    states=_STATES,
    title="Events",
    caption="Events",
    empty="No event matches.",
    key=lambda one: one.name,
    notes=lambda run, asked, rows: {"looked_at": _looked_at()},
    template="events",
)


@seeing
def events(request: HttpRequest) -> HttpResponse:
    """The page of all events that this project declares, or that the newest messages name."""
    try:
        return shown(request, EVENTS)
    except (ConfigurationError, InvalidSubscription) as error:
        return _not_imported(request, error)


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
    """The number of newest messages in which the page has looked. Only the broker in PostgreSQL lists them."""
    return LOOKED_AT if observer() is None else 0


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
