"""Django signals: dead letters, conditions, parked transactions, and the processes of a worker (docs/hooks.md)."""

from outbox.contrib.django.operations.signals import (
    condition_changed,
    message_dead_lettered,
    transaction_parked,
    worker_started,
    worker_stopped,
)

__all__ = [
    "condition_changed",
    "message_dead_lettered",
    "transaction_parked",
    "worker_started",
    "worker_stopped",
]
