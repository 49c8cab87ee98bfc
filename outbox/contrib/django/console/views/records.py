"""The pages of incidents of the broker, of reconciliation findings, and of operator actions."""

from __future__ import annotations

from django.db.models import Count
from django.http import HttpRequest, HttpResponse

from outbox.broker.log import incidents as noted
from outbox.contrib.django.actions.catalogue import ACTIONS
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import application, as_uuid, number, reading, text
from outbox.contrib.django.console.remedies import REMEDIES
from outbox.contrib.django.console.rendering import PER_PAGE, paged, problem, render
from outbox.contrib.django.models import Finding, OperatorAction, SavedReconciliation
from outbox.contrib.django.operations.findings import MAX_SAVED


@seeing
def incidents(request: HttpRequest) -> HttpResponse:
    """The page of incidents, newest first. A filter for the kind is optional."""
    kind = text(request.GET, "kind")
    with reading() as run:
        found = noted.recent(run, kind, before=number(request.GET, "after"), limit=PER_PAGE + 1)
    context = {
        "title": "Incidents",
        "page": paged(
            request, [(one, as_uuid(one.subject)) for one in found], lambda one: {"after": one[0].incident_id}
        ),
        "kind": kind,
        "kinds": list(noted.IncidentKind),
    }
    return render(request, "incidents", context)


@seeing
def findings(request: HttpRequest) -> HttpResponse:
    """The page of findings of the last saved reconciliation, each with its meaning and remedy."""
    kind = text(request.GET, "class")
    found = Finding.objects.order_by("id").filter(id__gt=number(request.GET, "after") or 0)
    with application():
        rows = list((found.filter(finding_class=kind) if kind else found)[: PER_PAGE + 1])
        counted = Finding.objects.values("output").annotate(findings=Count("pk")).filter(findings__gte=MAX_SAVED)
        cut = [one["output"] for one in counted]
        saved = list(SavedReconciliation.objects.defer("plan").order_by("output"))
    shown = [(one, as_uuid(one.message_id or one.transaction_id), REMEDIES.get(one.finding_class)) for one in rows]
    context = {
        "title": "Findings of reconciliation",
        "page": paged(request, shown, lambda one: {"after": one[0].pk}),
        "kind": kind,
        "classes": list(REMEDIES),
        "cut": cut,
        "saved": saved,
        "most": MAX_SAVED,
    }
    return render(request, "findings", context)


@seeing
def audit(request: HttpRequest) -> HttpResponse:
    """The page of operator actions, newest first."""
    given = {name: text(request.GET, name) for name in ("who", "action", "outcome")}
    before = number(request.GET, "after")
    found = OperatorAction.objects.order_by("-id").filter(**{name: value for name, value in given.items() if value})
    with application():
        rows = list((found.filter(id__lt=before) if before is not None else found)[: PER_PAGE + 1])
    context = {
        "title": "Audit",
        "page": paged(request, rows, lambda one: {"after": one.pk}),
        **given,
        "actions": sorted(ACTIONS),
        "outcomes": OperatorAction.Outcome.values,
    }
    return render(request, "audit", context)


@seeing
def audit_entry(request: HttpRequest, number: int) -> HttpResponse:
    """The page of one complete audit entry. A finished action redirects to this page."""
    with application():
        entry = OperatorAction.objects.filter(pk=number).first()
    if entry is None:
        return problem(request, "No such entry", f"The audit has no entry {number}.", status=404)
    return render(request, "audit_entry", {"title": f"{entry.action}: {entry.outcome}", "entry": entry})
