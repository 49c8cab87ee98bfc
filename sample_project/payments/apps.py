"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class PaymentsConfig(AppConfig):
    """Charges paid orders at the payment provider: consumer group payments."""

    name = "sample_project.payments"

    def ready(self) -> None:
        """Connect the receivers of signals."""
        from sample_project.payments import receivers  # noqa: F401
