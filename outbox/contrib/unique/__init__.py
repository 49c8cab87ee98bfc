"""Unique messages: an app whose table stores which message holds a key. docs/unique-messages.md is their page.

INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.unique"]

publish("invoice.requested", {"order_id": order.pk}, Unique(f"invoice:{order.pk}", within=3600))
"""

from __future__ import annotations

from outbox.contrib.unique.option import Unique as Unique
