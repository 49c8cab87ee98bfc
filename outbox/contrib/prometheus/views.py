"""The view for Prometheus."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from outbox.contrib.django.database import deadline
from outbox.contrib.django.views import REFUSED, SECONDS, may_see, with_headers
from outbox.contrib.prometheus.serving import answer
from outbox.errors import ConfigurationError


@with_headers
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer with the metrics for Prometheus.

    The client needs the permission to see the state of the broker, or the token, because the metrics name groups and
    topics.
    """
    if not may_see(request):
        return HttpResponse(f"{REFUSED}\n", status=403, content_type="text/plain; charset=utf-8")
    try:
        with deadline.within(SECONDS):
            content_type, text = answer()
    except ConfigurationError as error:
        return HttpResponse(f"{error}\n", status=503, content_type="text/plain; charset=utf-8")
    return HttpResponse(text, content_type=content_type)
