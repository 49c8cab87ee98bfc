"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class OffersConfig(AppConfig):
    """Offers to customers who have paid, by mail: consumer group offers."""

    name = "sample_project.offers"
