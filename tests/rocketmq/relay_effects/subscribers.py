"""The handlers of the relay's tests: each notes its message as an effect, in the transaction of the inbox."""

from __future__ import annotations

import os

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.retry import RetryPolicy
from outbox.subscription import Mode
from tests.django.shop.models import Effect

STEPS, LATER = os.environ["TEST_TOPICS"].split(",")
GROUP = os.environ["TEST_GROUP"]
RETRY = RetryPolicy(delays_seconds=[1], max_attempts=20)


@subscriber(STEPS, group=GROUP, mode=Mode.ORDERLY, retry=RETRY, timeout_seconds=10)
def step(delivery: Delivery) -> None:
    """Note the message."""
    Effect.objects.create(number=delivery.body)


@subscriber(LATER, group=f"{GROUP}-later", retry=RETRY, timeout_seconds=10)
def later(delivery: Delivery) -> None:
    """Note the message."""
    Effect.objects.create(number=delivery.body)
