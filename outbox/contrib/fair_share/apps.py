"""The Django application of fair share."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxFairShareConfig(AppConfig):
    """Messages of tenants in turn. To use it, add 'outbox.contrib.fair_share' to INSTALLED_APPS."""

    name = "outbox.contrib.fair_share"
    label = "outbox_fair_share"
    verbose_name = "Outbox fair share"
