"""The periodic work of a producer service as Celery tasks, driven by beat.

Overlapping, late or doubled runs are harmless: every pass claims its work in the database. The tasks have
a queue of their own and expire after one period, so a backlog of them cannot build up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery import Celery

from outbox.periodic import PeriodicPass

TASK_QUEUE: Final = "outbox"


def install(app: Celery, passes: list[PeriodicPass]) -> None:
    """Register one task and one beat entry per pass, named `outbox.<name>`, on the queue `outbox`."""
    for entry in passes:
        name = f"outbox.{entry.name}"
        app.task(_call(entry), name=name, ignore_result=True, acks_late=False)
        app.conf.beat_schedule = {
            **(app.conf.beat_schedule or {}),
            name: {
                "task": name,
                "schedule": entry.interval_seconds,
                "options": {"queue": TASK_QUEUE, "expires": entry.interval_seconds},
            },
        }


def _call(entry: PeriodicPass) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        return dict(entry.run())

    return run
