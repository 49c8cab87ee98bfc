"""The Django application of typed events."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxEventsConfig(AppConfig):
    """Typed events. To publish and handle them, add 'outbox.contrib.events' to INSTALLED_APPS."""

    name = "outbox.contrib.events"
    label = "outbox_events"
    verbose_name = "Outbox events"
