"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class OrdersConfig(AppConfig):
    """Placing and paying orders; the producer of order.paid."""

    name = "sample_project.orders"
