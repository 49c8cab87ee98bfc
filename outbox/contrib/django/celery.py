"""Adds outbox to a project's Celery app: the worker option `--outbox`, and periodic passes in the beat schedule.

    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    outbox.contrib.django.celery.setup(app)

Run `celery -A shop worker --outbox`. Only `outbox.broker.celery` imports Celery.
"""

from __future__ import annotations

from typing import Any

from outbox.broker.celery import beat, bootstep
from outbox.broker.celery.tasks import record_what_waits
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.publishing.celery_tasks import TransactionalTask, subscriber_task
from outbox.contrib.django.worker.periodic import tasks
from outbox.contrib.django.worker.roles import known_roles, supervisor

__all__ = ["TransactionalTask", "setup", "subscriber_task"]


def setup(app: Any) -> None:
    """Add `--outbox` and `--outbox-roles` to the app's worker, and check-back and pruning to its beat schedule.

    A transactional task is stored with the caller's transaction even if the caller sends the task by its name.

    The tasks and the schedule are added when Celery finalises the app, because a Celery module may be imported before
    Django is set up. If the app is already finalised, the tasks and the schedule are added at once.
    """
    bootstep.install(app, supervisor, roles=known_roles)
    bootstep.flush_at_end(flush)
    record_what_waits(app)
    beat.install(app, tasks)
