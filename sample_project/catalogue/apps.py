"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class CatalogueConfig(AppConfig):
    """What is for sale."""

    name = "sample_project.catalogue"
