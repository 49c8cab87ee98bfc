"""The Django application that edits dead letters."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks

hooks.add_fault_points("editing.after_original", "editing.after_change", "editing.after_commit")


class OutboxEditingConfig(AppConfig):
    """Dead letters that operators edit. Add 'outbox.contrib.editing' to INSTALLED_APPS to use it."""

    name = "outbox.contrib.editing"
    label = "outbox_editing"
    verbose_name = "Outbox editing"

    def ready(self) -> None:
        """Join the core: a table of the broker, which an erasure empties, an action and a listing."""
        hooks.add_schema("editing", f"{self.name}.schema", content={"edited_letter": f"{self.name}.letters.erase"})
        hooks.add_actions(f"{self.name}.actions")
