"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class CatalogueConfig(AppConfig):
    """The products of the shop."""

    name = "sample_project.catalogue"
