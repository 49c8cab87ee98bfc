"""The page of endpoints: what the processes of the role forward have delivered, and which endpoints are disabled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import application
from outbox.contrib.django.console.rendering import render
from outbox.contrib.django.console.states import by_state
from outbox.contrib.django.models import ForwardEndpoint
from outbox.contrib.django.operations.endpoints import list_endpoints


def _failed_last(one: ForwardEndpoint) -> bool:
    """Whether the last delivery that the processes have stored has failed."""
    return one.last_error_at is not None and (
        one.last_delivered_at is None or one.last_error_at > one.last_delivered_at
    )


_STATES: Final[Mapping[str, tuple[str, Callable[[ForwardEndpoint], bool]]]] = {
    "": ("All", lambda one: True),
    "enabled": ("Enabled", lambda one: one.disabled_at is None),
    "disabled": ("Disabled", lambda one: one.disabled_at is not None),
    "failing": ("Failed last", _failed_last),
}


@seeing
def endpoints(request: HttpRequest) -> HttpResponse:
    """The page of all endpoints of this project's OUTBOX['FORWARD']."""
    with application():
        found = list_endpoints()
    rows, state, tabs = by_state(request, found, _STATES)
    context = {"title": "Endpoints", "rows": rows, "state": state, "tabs": tabs, "is_used": bool(found)}
    return render(request, "endpoints", context)
