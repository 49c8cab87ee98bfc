"""The page of endpoints: what the processes of the role forward have delivered, and which endpoints are disabled."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import application
from outbox.contrib.django.console.rendering import render
from outbox.contrib.django.operations.endpoints import list_endpoints


@seeing
def endpoints(request: HttpRequest) -> HttpResponse:
    """The page of all endpoints of this project's OUTBOX['FORWARD']."""
    with application():
        rows = list_endpoints()
    return render(request, "endpoints", {"title": "Endpoints", "rows": rows})
