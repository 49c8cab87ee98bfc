"""The periodic work of a producer service as Celery tasks, for services without a worker with `--outbox`.

A worker with `--outbox` runs the passes itself. If beat sends a task between two passes of the worker, the task finds
that its pass has just run, and does nothing. The tasks go to Celery's default queue, or to the queue that `task_routes`
names. A worker must consume the queue of these tasks. The tasks do not expire: a task that waited behind other tasks
still runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.signals import import_modules

from outbox.utils.periodic import PeriodicPass


def install(app: Celery, passes: Callable[[], list[PeriodicPass]]) -> None:
    """Register one task and one beat entry per pass, both named `outbox.<name>`.

    The function calls `passes` and registers the tasks only when Celery has finalised the app, because a Celery module
    may be imported before the settings can be read. Worker and beat also do so at their start, because an app that is
    finalised while Django imports it lacks the passes of the apps that Django makes ready later.
    """
    added: set[str] = set()

    def add(**_: Any) -> None:
        # The project may have changed or removed an entry since it was added.
        new = [entry for entry in passes() if entry.name not in added]
        added.update(entry.name for entry in new)
        _add(app, new)

    if app.finalized:
        add()
    else:
        app.on_after_finalize.connect(add, weak=False)
    import_modules.connect(add, sender=app, weak=False)


def _add(app: Celery, passes: list[PeriodicPass]) -> None:
    for entry in passes:
        app.task(_call(entry), name=f"outbox.{entry.name}", ignore_result=True, acks_late=False)
    app.conf.beat_schedule = {
        **(app.conf.beat_schedule or {}),
        **{f"outbox.{e.name}": {"task": f"outbox.{e.name}", "schedule": e.interval_seconds} for e in passes},
    }


def _call(entry: PeriodicPass) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        ends = time.monotonic() + entry.interval_seconds
        counts = entry.run()
        while counts.get("more") and time.monotonic() < ends:
            counts = entry.run()
        return dict(counts)

    return run
