"""The Django application of sagas."""

from __future__ import annotations

from typing import Final

from django.apps import AppConfig

from outbox import hooks

_MEND_SECONDS: Final = 60.0


class OutboxSagaConfig(AppConfig):
    """Sagas. To use them, add 'outbox.contrib.saga' to INSTALLED_APPS."""

    name = "outbox.contrib.saga"
    label = "outbox_saga"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox sagas"

    def ready(self) -> None:
        """Join the core: a pass, a condition and a table."""
        hooks.add_conditions("outbox.contrib.saga.steps")
        hooks.add_pass("sagas", _MEND_SECONDS, "outbox.contrib.saga.steps.mend")
        hooks.add_tables(
            self.label,
            rights={"outbox_saga": {"SELECT": (), "INSERT": (), "UPDATE": ()}},
            content={"SagaProgress": "outbox.contrib.saga.steps.erase_reasons"},
        )
