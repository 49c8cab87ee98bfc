"""The app of the tables; its label differs from that of another test app."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The tables of the cases."""

    name = "tests.crash_kit.shop"
    label = "crash_shop"
