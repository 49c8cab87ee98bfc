"""The Django application of erasures."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks
from outbox.contrib.erasure.settings import ErasureSettings

hooks.add_settings(ErasureSettings)


class OutboxErasureConfig(AppConfig):
    """Erasures. To erase personal data, add 'outbox.contrib.erasure' to INSTALLED_APPS."""

    name = "outbox.contrib.erasure"
    label = "outbox_erasure"
    verbose_name = "Outbox erasures"

    def ready(self) -> None:
        """Join the core: the tables of what was erased, the action, the list, and its comparison before consuming."""
        hooks.add_schema("erasure", f"{self.name}.schema")
        hooks.add_tables(self.label, content={"ErasureEntry": None})
        hooks.add_actions(f"{self.name}.actions")
        hooks.add_list(f"{self.name}.erasing.list_of_settings")
        hooks.add_preparation(
            "the comparison of the list of erasures with the databases", f"{self.name}.erasing.repeat_erasures"
        )
