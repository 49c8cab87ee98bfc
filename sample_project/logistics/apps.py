"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class LogisticsConfig(AppConfig):
    """Ships paid orders: consumer group logistics, producer of shipment.created."""

    name = "sample_project.logistics"
