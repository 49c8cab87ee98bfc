"""The lists of incidents of the broker and of operator actions, and the page of one action."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html

from outbox.broker.log import incidents as noted
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import application, as_uuid
from outbox.contrib.console.rendering import problem, render
from outbox.contrib.django.actions.cells import badge, inert, link, message_link, readable, shortened, told, words
from outbox.contrib.django.actions.declaration import Field, FieldKind
from outbox.contrib.django.actions.listing import Asked, Column, Listing
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.models import OperatorAction

INCIDENTS: Final = Listing(
    "incidents",
    (
        Column("When", "at"),
        Column("Kind", lambda one: words(one.kind)),
        Column("About", lambda one: message_link(found) if (found := as_uuid(one.subject)) else one.subject),
        Column("What", lambda one: format_html("{}", told(readable(one.detail))), "lines"),
    ),
    lambda run, asked: noted.recent(run, asked["kind"], before=asked["after"], limit=asked.limit),
    fields=(Field("kind", "only incidents of this kind", choices=tuple(noted.IncidentKind)),),
    after=Field("after", "the incidents before this one", FieldKind.NUMBER),
    position=lambda one: one.incident_id,
    address="incidents/",
    title="Incidents",
    caption="Incidents, newest first",
    empty="No incidents are recorded.",
)


def _read_actions(run: None, asked: Asked) -> list[OperatorAction]:
    given = {**asked.only("who", "action", "outcome"), "id__lt": asked["after"]}
    narrowed = {name: one for name, one in given.items() if one is not None}
    return list(OperatorAction.objects.order_by("-id").filter(**narrowed)[: asked.limit])


def _outcome(one: OperatorAction) -> list[object]:
    said = badge(one.outcome, "good" if one.outcome == "done" else "bad")
    return [said, *([badge("no process answers", "warn")] if one.after.get("no_answer") else [])]


AUDIT: Final = Listing(
    "audit",
    (
        Column("When", "at"),
        Column("User", "who"),
        Column("Action", lambda one: link(one.action, "audit_entry", one.pk)),
        Column("About", lambda one: shortened(inert(one.subject), 120)),
        Column("Reason", lambda one: shortened(inert(one.why), 120)),
        Column("Outcome", _outcome),
    ),
    _read_actions,
    of_broker=False,
    fields=(
        Field("who", "only actions of this user", label="User"),
        Field("action", "only actions of this kind", choices=sorted(ACTIONS)),
        Field("outcome", "only actions with this outcome", choices=OperatorAction.Outcome.values),
    ),
    after=Field("after", "the actions before this one", FieldKind.NUMBER),
    position=lambda one: one.pk,
    address="audit/",
    title="Audit",
    caption="Actions of operators, newest first",
    empty="No actions are recorded yet.",
)


@seeing
def audit_entry(request: HttpRequest, number: int) -> HttpResponse:
    """The page of one complete audit entry. A finished action redirects to this page."""
    with application():
        entry = OperatorAction.objects.filter(pk=number).first()
    if entry is None:
        return problem(request, "No such entry", f"The audit has no entry {number}.", status=404)
    return render(request, "audit_entry", {"title": f"{entry.action}: {entry.outcome}", "entry": entry})
