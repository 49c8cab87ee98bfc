"""The Django application of the operations page."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConsoleConfig(AppConfig):
    """The operations page. To use it, add 'outbox.contrib.console' to INSTALLED_APPS, and include its urls."""

    name = "outbox.contrib.console"
    label = "outbox_console"
    verbose_name = "Outbox operations"
