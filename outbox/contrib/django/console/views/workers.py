"""The page of workers: each consumer process with its version, queues, running calls and last sign of life."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse

from outbox.broker.log.failing import failing
from outbox.broker.operations import summary
from outbox.broker.operations.listings import PROCESS_STATES, list_processes
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import number, reading, text
from outbox.contrib.django.console.rendering import PER_PAGE, paged, render
from outbox.contrib.django.console.states import StateTab

_STATES: Final = ("", *PROCESS_STATES)


@seeing
def workers(request: HttpRequest) -> HttpResponse:
    """The page of all consumer processes, or of the processes of one group, and of the parts of processes that fail."""
    group, state, after = text(request.GET, "group"), text(request.GET, "state"), number(request.GET, "after") or 0
    state = state if state in PROCESS_STATES else None
    with reading() as run:
        leader = summary.leadership(run)
        rows = list_processes(run, group, state=state, after=after, limit=PER_PAGE + 1)
        parts = failing(run)
    context = {
        "title": "Workers" + (f" of {group}" if group else ""),
        "page": paged(request, rows, lambda _: {"after": after + PER_PAGE}),
        "group": group,
        "state": state or "",
        "tabs": [StateTab(one, one.capitalize() or "All", _query(state=one, group=group), None) for one in _STATES],
        "failing": parts,
        "leader": leader,
        "versions": sorted({one.version for one in rows if one.version and one.is_alive}),
    }
    return render(request, "workers", context)


def _query(**values: str | None) -> str:
    return "?" + urlencode({name: value for name, value in values.items() if value})
