"""The answer to an address that no page has, such as that of a message with a malformed id."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.rendering import problem


@seeing
def unknown(request: HttpRequest) -> HttpResponse:
    """Answer 404 with the headers of the other pages, which the project's own answer would not have."""
    return problem(request, "No such page", "The operations pages have no such address.", status=404)
