"""The page of workers: each consumer process with its version, queues, running calls and last sign of life."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from outbox.broker.log.failing import failing
from outbox.broker.operations.listings import list_processes
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import number, reading, text
from outbox.contrib.django.console.rendering import PER_PAGE, paged, render


@seeing
def workers(request: HttpRequest) -> HttpResponse:
    """The page of all consumer processes, or of the processes of one group, and of the parts of processes that fail."""
    group, after = text(request.GET, "group"), number(request.GET, "after") or 0
    with reading() as run:
        rows = list_processes(run, group, after=after, limit=PER_PAGE + 1)
        parts = failing(run)
    context = {
        "title": "Workers" + (f" of {group}" if group else ""),
        "page": paged(request, rows, lambda _: {"after": after + PER_PAGE}),
        "group": group,
        "failing": parts,
        "versions": sorted({one.version for one in rows if one.version and one.is_alive}),
    }
    return render(request, "workers", context)
