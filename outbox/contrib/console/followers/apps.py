"""The Django application that records the causes of messages."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks


class OutboxFollowersConfig(AppConfig):
    """Causes of messages. To record them, add 'outbox.contrib.console.followers' to INSTALLED_APPS of the workers."""

    name = "outbox.contrib.console.followers"
    label = "outbox_followers"
    verbose_name = "Outbox followers"

    def ready(self) -> None:
        """Join the core: a header of what handlers publish."""
        hooks.add_body_step("followers", f"{self.name}.cause.CauseStep")
