"""The view that runs an action: it shows the plan, asks for a reason, and records the action in the audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from outbox.contrib.console.access import acting
from outbox.contrib.console.asking import ACTION_SECONDS, values_of
from outbox.contrib.console.rendering import BODIES, render
from outbox.contrib.django.actions.audit import recorded
from outbox.contrib.django.actions.declaration import DeclaredAction
from outbox.contrib.django.database import deadline

_NOT_PASSED_ON: Final = frozenset({"csrfmiddlewaretoken", "confirmed", "why"})


def view_of(action: DeclaredAction) -> Callable[..., HttpResponse]:
    """The view of an action: it shows the plan, and runs the action after the operator confirms it with a reason."""

    assert action.permission is not None

    @acting(action.permission, *([BODIES] if action.shows_bodies else []))
    def view(request: HttpRequest) -> HttpResponse:
        given = request.POST
        plan = action.plan(values_of(action.fields, given))
        why = given.get("why", "").strip()
        is_confirmed = given.get("confirmed") == "yes"
        if not is_confirmed or not why or plan.nothing or plan.refusal:
            options = [field for field in action.fields if field.with_confirmation]
            fields = [
                (name, value)
                for name, values in given.lists()
                if name not in _NOT_PASSED_ON | {field.name for field in options} | set(plan.pinned)
                for value in values
            ]
            context = {
                "title": action.title,
                "plan": plan,
                "options": options,
                "fields": [*fields, *plan.pinned.items()],
                "back": _local(given.get("back", "")),
                "is_missing_why": is_confirmed and not why,
                # The operator has confirmed a refused action without the choice that it needs.
                "is_missing_choice": is_confirmed and bool(plan.refusal) and bool(options),
                "why": why,
            }
            return render(request, "confirm", context, status=422 if is_confirmed else 200)
        with deadline.within(ACTION_SECONDS):
            entry = recorded(action.name, plan, who=request.user.get_username(), why=why)
        return redirect("outbox:audit_entry", entry.pk)

    return view


def _local(address: str) -> str:
    """Return the address that a form contains if it is a path of this site, else ''."""
    return address if address.startswith("/") and not address.startswith(("//", "/\\")) else ""
