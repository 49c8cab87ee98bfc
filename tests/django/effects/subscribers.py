"""Subscribers that worker processes of the tests discover."""

from __future__ import annotations

from collections.abc import Sequence

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.django.shop.models import Effect


@subscriber("orders", group="effects")
def effect(delivery: Delivery) -> None:
    """Note the order; the step after it is published within the same transaction."""
    Effect.objects.create(number=delivery.key)
    publish("steps", {"number": delivery.key}, key=delivery.key)


@subscriber("steps", group="effects", batch=50, mode="orderly")
def step(deliveries: Sequence[Delivery]) -> None:
    """Note the steps of a batch."""
    Effect.objects.bulk_create(Effect(number=f"step-{item.key}") for item in deliveries)
