"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class StorefrontConfig(AppConfig):
    """The pages. This app reads every other app; no other app reads it."""

    name = "sample_project.storefront"
