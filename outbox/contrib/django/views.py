"""For load balancers, monitoring and scrapers: health, status and metrics over HTTP."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from outbox.broker.operations.conditions import Severity
from outbox.contrib.django.operations import exposition
from outbox.contrib.django.operations.watching import look, probe


@never_cache
@require_safe
def health(request: HttpRequest) -> HttpResponse:
    """200 when messages move, else 503. For everybody, so without details; those are for who may see the status."""
    found = probe()
    body: dict[str, object] = {"healthy": found.is_healthy}
    if _may_see(request):
        body["problems"] = list(found.problems)
    return JsonResponse(body, status=200 if found.is_healthy else 503)


@never_cache
@require_safe
def status(request: HttpRequest) -> HttpResponse:
    """Verdict and overview as JSON: 200, or 503 when something is critical. For staff, or with the token."""
    if not _may_see(request):
        return JsonResponse({"error": "for staff, or with the token of OUTBOX['METRICS_TOKEN']"}, status=403)
    found = look()
    return JsonResponse(found.as_json(), status=503 if found.verdict.severity is Severity.CRITICAL else 200)


@never_cache
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """What Prometheus scrapes. For staff, or the token: groups and topics are named."""
    if not _may_see(request):
        return HttpResponse("for staff, or with the token of OUTBOX['METRICS_TOKEN']\n", status=403)
    return HttpResponse(exposition.render(), content_type=exposition.CONTENT_TYPE)


def _may_see(request: HttpRequest) -> bool:
    user = getattr(request, "user", None)
    if user is not None and user.is_active and getattr(user, "is_staff", False):
        return True
    return exposition.is_authorized(request.headers.get("Authorization", ""))
