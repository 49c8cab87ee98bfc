"""Registers one subscriber for each queue of each backend in TASKS."""

from __future__ import annotations

from django.db import router

from outbox.contrib.django.subscribers.registry import Subscriber, register
from outbox.contrib.tasks.api import task_backends
from outbox.contrib.tasks.backend import OutboxBackend
from outbox.contrib.tasks.models import TaskEntry
from outbox.contrib.tasks.running import handler_for
from outbox.subscription import Subscription


def register_backends() -> None:
    """Register the subscribers of all backends.

    Raises an error if the definition of a backend or its options is wrong.
    """
    using = router.db_for_write(TaskEntry)
    for backend in task_backends.all():
        if isinstance(backend, OutboxBackend):
            for group, queue in backend.groups.items():
                register(
                    Subscriber(
                        subscription=Subscription(
                            group=group,
                            topic=backend.settings.topic,
                            filter=queue,
                            threads=backend.settings.threads,
                            timeout_seconds=backend.settings.timeout_seconds,
                        ),
                        handler=handler_for(backend, using=using),
                        name=f"TASKS[{backend.alias!r}], queue {queue or '(any)'}",
                        using=using,
                    )
                )
