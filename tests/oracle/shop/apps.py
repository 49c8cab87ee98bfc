"""The app."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The shop of the oracle."""

    name = "tests.oracle.shop"
    label = "shop"
