"""The Django application of blocked keys."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks
from outbox.contrib.blocked_keys.declaration import BlockKey

hooks.add_fault_points("blocked_keys.before_release", "blocked_keys.after_release")


class OutboxBlockedKeysConfig(AppConfig):
    """Dead letters that block their keys. To use them, add 'outbox.contrib.blocked_keys' to INSTALLED_APPS."""

    name = "outbox.contrib.blocked_keys"
    label = "outbox_blocked_keys"
    verbose_name = "Outbox blocked keys"

    def ready(self) -> None:
        """Join the core: a table of the broker, the calls of handlers, work of the leader, a condition."""
        content = {"blocking_message": f"{self.name}.blocking.replace_keys"}
        hooks.add_schema("blocked_keys", f"{self.name}.schema", content=content)
        hooks.add_handler_wrapper(BlockKey, f"{self.name}.calling.unless_blocked")
        hooks.add_leader_work("blocked_keys", f"{self.name}.releasing.Releasing")
        hooks.add_conditions(f"{self.name}.blocking", of_broker=True)
