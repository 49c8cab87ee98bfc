"""The addresses of the operations pages. The addresses of actions come from the catalogue."""

from __future__ import annotations

from django.urls import path

from outbox.contrib.django.actions.catalogue import ACTIONS
from outbox.contrib.django.console.views import (
    dead_letters,
    endpoints,
    events,
    groups,
    messages,
    overview,
    records,
    schedules,
    timeline,
    waiting,
    workers,
)
from outbox.contrib.django.console.views.acting import view_of

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("history/", overview.history, name="history"),
    path("liveness/", overview.liveness, name="liveness"),
    path("timeline/", timeline.timeline, name="timeline"),
    path("messages/", messages.search, name="search"),
    path("messages/<uuid:message_id>/", messages.message, name="message"),
    path("undecided/", waiting.undecided, name="undecided"),
    path("dead-letters/", dead_letters.dead_letters, name="dead_letters"),
    path("dead-letters/list/", dead_letters.letters, name="letters"),
    path("waiting/", waiting.waiting, name="waiting"),
    path("groups/", groups.groups, name="groups"),
    path("groups/one/", groups.group, name="group"),
    path("workers/", workers.workers, name="workers"),
    path("topics/", groups.topics, name="topics"),
    path("topics/one/", groups.topic, name="topic"),
    path("events/", events.events, name="events"),
    path("events/one/", events.event, name="event"),
    path("schedules/", schedules.schedules, name="schedules"),
    path("endpoints/", endpoints.endpoints, name="endpoints"),
    path("findings/", records.findings, name="findings"),
    path("incidents/", records.incidents, name="incidents"),
    path("audit/", records.audit, name="audit"),
    path("audit/<int:number>/", records.audit_entry, name="audit_entry"),
    *(
        path(f"act/{name.replace('_', '-')}/", view_of(action), name=f"act_{name}")
        for name, action in ACTIONS.items()
        if action.permission is not None
    ),
]
