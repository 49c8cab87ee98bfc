"""Django signals: dead letters, conditions, and the processes of a worker (docs/hooks.md)."""

from outbox.contrib.django.operations.signals import (
    condition_changed,
    message_dead_lettered,
    worker_started,
    worker_stopped,
)

__all__ = [
    "condition_changed",
    "message_dead_lettered",
    "worker_started",
    "worker_stopped",
]
