"""The Django application of unique messages."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks


class OutboxUniqueConfig(AppConfig):
    """Unique messages. To publish them, add 'outbox.contrib.unique' to INSTALLED_APPS."""

    name = "outbox.contrib.unique"
    label = "outbox_unique"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox unique messages"

    def ready(self) -> None:
        """Join the core: the table, and the pruning of its rows."""
        hooks.add_tables(
            self.label,
            rights={"outbox_unique": {"SELECT": (), "INSERT": (), "UPDATE": ()}},
            content={"UniqueKey": "outbox.contrib.unique.keys.erase_keys"},
        )
        hooks.add_pruning("outbox_unique", "outbox.contrib.unique.keys.delete_expired")
