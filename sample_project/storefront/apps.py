"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class StorefrontConfig(AppConfig):
    """The pages. It reads every app and is read by none."""

    name = "sample_project.storefront"
