"""The subscribers of the worker processes of most tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.retry import RetryPolicy
from tests.django.shop.models import Effect


@subscriber("orders", group="effects")
def effect(delivery: Delivery) -> None:
    """Note the order; the step after it is published within the same transaction. Some orders kill this process."""
    Effect.objects.create(number=delivery.key)
    if delivery.key.startswith("kills-"):
        os._exit(9)
    publish("steps", {"number": delivery.key}, key=delivery.key)


@subscriber("payments", group="effects", retry=RetryPolicy(delays_seconds=[0.0], max_attempts=20))
def payment(delivery: Delivery) -> None:
    """Fails first, so that the message goes away and comes back."""
    Effect.objects.create(number=f"payment-{delivery.key}")
    if delivery.attempt == 1:
        raise RuntimeError("the first attempt of every payment fails")


@subscriber("steps", group="effects", batch=50, mode="orderly")
def step(deliveries: Sequence[Delivery]) -> None:
    """Note the steps of a batch."""
    Effect.objects.bulk_create(Effect(number=f"step-{item.key}") for item in deliveries)
