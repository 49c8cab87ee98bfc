"""The Django application of the reconciliation's findings."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks
from outbox.contrib.reconciliation.settings import ReconciliationSettings

hooks.add_settings(ReconciliationSettings)
hooks.add_fault_points("repair.after_intent", "repair.after_effect", "repair.after_outcome")


class OutboxReconciliationConfig(AppConfig):
    """Findings of the reconciliation, and their repair. To use them, add 'outbox.contrib.reconciliation'
    to INSTALLED_APPS."""

    name = "outbox.contrib.reconciliation"
    label = "outbox_reconciliation"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox reconciliation"

    def ready(self) -> None:
        """Join the core: a condition, actions, a listing and tables."""
        hooks.add_conditions("outbox.contrib.reconciliation.findings")
        hooks.add_actions("outbox.contrib.reconciliation.actions")
        hooks.add_tables(
            self.label,
            content={
                "Finding": "outbox.contrib.reconciliation.erasing.erase_findings",
                "SavedReconciliation": "outbox.contrib.reconciliation.erasing.erase_results",
            },
        )
