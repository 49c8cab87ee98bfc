"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class CartConfig(AppConfig):
    """Carts, cleared once their order is paid: consumer group cart."""

    name = "sample_project.cart"
