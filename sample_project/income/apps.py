"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class IncomeConfig(AppConfig):
    """Adds up the payments: three consumer groups, producer of order.enriched and income.minute."""

    name = "sample_project.income"
