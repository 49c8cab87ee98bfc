"""The views for load balancers and monitoring: health and status."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from django.conf import settings
from django.core.handlers.exception import response_for_exception
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.cache import add_never_cache_headers
from django.views.decorators.http import require_safe

from outbox.broker.operations.conditions import Severity
from outbox.contrib.django.database import deadline
from outbox.contrib.django.operations.watching import is_authorized, look, probe
from outbox.errors import ConfigurationError

logger = logging.getLogger(__name__)

# The permission that a user needs to see the state of the broker.
SEE: Final = "outbox.view_operations"
# The time limit for all database requests of one view together.
SECONDS: Final = 5.0

REFUSED: Final = (
    f"This view needs a staff user with the permission {SEE}, or the header `Authorization: Bearer` with the token "
    "of OUTBOX['STATUS_TOKEN']."
)
_POLICY: Final = "default-src {sources}; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

View = Callable[..., HttpResponse]


def with_headers(view: View, sources: Callable[[], str] = lambda: "'self'") -> View:
    """Wrap a view of outbox: each of its answers has the same headers and is not cached, an error's answer too.

    The Content-Security-Policy allows only files of this site, or those of `sources`.

    With ATOMIC_REQUESTS, Django would begin a transaction before the view, which then could not answer while the
    database is away. A view that needs a transaction begins its own.
    """

    @wraps(view)
    def headed(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        # A charset that the client names may have no text, or texts that cannot be encoded again.
        request.encoding = "utf-8"
        try:
            response = view(request, *args, **kwargs)
        except Exception as error:
            if settings.DEBUG:
                # The policy would hide the styles of Django's debug page.
                raise
            # Report the error, and answer it with the project's handler500, as Django does after the view.
            response = response_for_exception(request, error)
        # Keep a header that the response already has.
        response.headers.setdefault("Content-Security-Policy", _POLICY.format(sources=sources()))
        response.headers.setdefault("Referrer-Policy", "same-origin")
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        add_never_cache_headers(response)
        return response

    for alias in connections:
        transaction.non_atomic_requests(using=alias)(headed)
    return headed


def may(request: HttpRequest, permission: str) -> bool:
    user = getattr(request, "user", None)
    return user is not None and user.is_active and user.is_staff and user.has_perm(permission)


@with_headers
@require_safe
def health(request: HttpRequest) -> HttpResponse:
    """Answer 200 while messages are delivered, else 503.

    Every client gets an answer. The answer contains the problems only if the client may see the status.
    """
    try:
        with deadline.within(SECONDS):
            problems = list(probe().problems)
    except ConfigurationError as error:
        # A load balancer takes the site out of service, and the answer does not tell it why.
        logger.error("health/ answers 503, so a load balancer sends no requests: %s", error)
        problems = [str(error)]
    body: dict[str, object] = {"healthy": not problems}
    if may_see(request):
        body["problems"] = problems
    return JsonResponse(body, status=503 if problems else 200)


@with_headers
@require_safe
def status(request: HttpRequest) -> HttpResponse:
    """Answer with the verdict and the overview as JSON. The HTTP status is 503 if the verdict is critical, else 200.

    The client needs the permission to see the state of the broker, or the token.
    """
    if not may_see(request):
        return JsonResponse({"error": REFUSED}, status=403)
    try:
        with deadline.within(SECONDS):
            found = look()
    except ConfigurationError as error:
        return JsonResponse({"error": str(error)}, status=503)
    return JsonResponse(found.as_json(), status=503 if found.verdict.severity is Severity.CRITICAL else 200)


def may_see(request: HttpRequest) -> bool:
    """Whether the client may see the state of the broker: by the token, or by the permission of its user."""
    # Check the token first, because a scraper has no account. A scraper must also get an answer while the accounts
    # cannot be read.
    if is_authorized(request.headers.get("Authorization", "")):
        return True
    try:
        return may(request, SEE)
    except DatabaseError:
        return False
