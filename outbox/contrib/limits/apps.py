"""The Django application of limits."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks


class OutboxLimitsConfig(AppConfig):
    """Limits of subscriptions. To use them, add 'outbox.contrib.limits' to INSTALLED_APPS."""

    name = "outbox.contrib.limits"
    label = "outbox_limits"
    verbose_name = "Outbox limits"

    def ready(self) -> None:
        """Offer the action `limits`, and the metrics. The package itself has joined the core, for programs without
        Django."""
        hooks.add_actions("outbox.contrib.limits.actions")
        hooks.add_metrics("outbox.contrib.limits.operations")
