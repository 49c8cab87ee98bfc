"""The views for load balancers, monitoring and scrapers: health, status and metrics."""

from __future__ import annotations

from typing import Final

from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_safe

from outbox.broker.operations.conditions import Severity
from outbox.contrib.django.console.access import with_headers
from outbox.contrib.django.console.asking import SECONDS
from outbox.contrib.django.console.rendering import SEE, may
from outbox.contrib.django.database import deadline
from outbox.contrib.django.operations import telemetry
from outbox.contrib.django.operations.watching import look, probe

_REFUSED: Final = (
    f"This view needs a staff user with the permission {SEE}, or the header `Authorization: Bearer` with the token "
    "of OUTBOX['METRICS_TOKEN']."
)


@with_headers
@require_safe
def health(request: HttpRequest) -> HttpResponse:
    """Answer 200 while messages are delivered, else 503.

    Every client gets an answer. The answer contains the problems only if the client may see the status.
    """
    with deadline.within(SECONDS):
        found = probe()
    body: dict[str, object] = {"healthy": found.is_healthy}
    if _may_see(request):
        body["problems"] = list(found.problems)
    return JsonResponse(body, status=200 if found.is_healthy else 503)


@with_headers
@require_safe
def status(request: HttpRequest) -> HttpResponse:
    """Answer with the verdict and the overview as JSON. The HTTP status is 503 if the verdict is critical, else 200.

    The client needs the permission to see the operations page, or the token.
    """
    if not _may_see(request):
        return JsonResponse({"error": _REFUSED}, status=403)
    with deadline.within(SECONDS):
        found = look()
    return JsonResponse(found.as_json(), status=503 if found.verdict.severity is Severity.CRITICAL else 200)


@with_headers
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer with the metrics for Prometheus.

    The client needs the permission to see the operations page, or the token, because the metrics name groups and
    topics.
    """
    if not _may_see(request):
        return HttpResponse(f"{_REFUSED}\n", status=403, content_type="text/plain; charset=utf-8")
    with deadline.within(SECONDS):
        return HttpResponse(telemetry.render(), content_type=telemetry.CONTENT_TYPE)


def _may_see(request: HttpRequest) -> bool:
    # Check the token first, because a scraper has no account. A scraper must also get an answer while the accounts
    # cannot be read.
    if telemetry.is_authorized(request.headers.get("Authorization", "")):
        return True
    try:
        return may(request, SEE)
    except DatabaseError:
        return False
