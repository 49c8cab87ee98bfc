"""Sends one model to another database than the rest."""

from __future__ import annotations

from typing import Any

from django.db.models import Model


class PaymentsElsewhere:
    """Payments are written to the alias 'other'."""

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        """'other' for payments, no opinion about the rest."""
        return "other" if model._meta.model_name == "payment" else None

    db_for_read = db_for_write
