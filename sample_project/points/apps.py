"""Django's registration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class PointsConfig(AppConfig):
    """Credits loyalty points for paid orders: consumer group points."""

    name = "sample_project.points"
