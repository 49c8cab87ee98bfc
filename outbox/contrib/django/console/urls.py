"""The addresses of the operations pages. Those of actions and of the lists of commands come from the catalogue."""

from __future__ import annotations

from django.urls import path

from outbox.contrib.django.catalogue import ACTIONS, LISTINGS
from outbox.contrib.django.console.views import (
    acting,
    dead_letters,
    events,
    groups,
    listing,
    messages,
    overview,
    records,
    timeline,
    waiting,
)

# Each page of a declared list has the list's name and address.
LISTED = (
    groups.GROUPS,
    groups.TOPICS,
    waiting.WAITING,
    records.INCIDENTS,
    records.AUDIT,
    *(one for one in LISTINGS.values() if one.address),
)

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("history/", overview.history, name="history"),
    path("liveness/", overview.liveness, name="liveness"),
    path("timeline/", timeline.timeline, name="timeline"),
    path("messages/", messages.search, name="search"),
    path("messages/<uuid:message_id>/", messages.message, name="message"),
    path("dead-letters/", dead_letters.dead_letters, name="dead_letters"),
    path("groups/one/", groups.group, name="group"),
    path("topics/one/", groups.topic, name="topic"),
    path("events/", events.events, name="events"),
    path("events/one/", events.event, name="event"),
    path("audit/<int:number>/", records.audit_entry, name="audit_entry"),
    *(path(one.address, listing.view_of(one), name=one.name) for one in LISTED),
    *(
        path(f"act/{name.replace('_', '-')}/", acting.view_of(action), name=f"act_{name}")
        for name, action in ACTIONS.items()
        if action.permission is not None
    ),
]
