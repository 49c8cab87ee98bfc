"""The handlers of the orders; topics and groups have the names that the test gave."""

from __future__ import annotations

import os
import signal

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.retry import RetryPolicy
from tests.django.shop.models import Effect

ORDERS, STEPS, LATER = os.environ["TEST_TOPICS"].split(",")
GROUP = os.environ["TEST_GROUP"]


@subscriber(ORDERS, group=GROUP, retry=RetryPolicy(delays_seconds=[1], max_attempts=20), threads=4)
def order(delivery: Delivery) -> None:
    """Note the order, and publish its step within the same transaction. Some orders kill this process, once."""
    Effect.objects.create(number=delivery.key)
    if delivery.key.startswith("kills-") and delivery.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    publish(STEPS, {"number": delivery.key}, key=delivery.key)


@subscriber(LATER, group=GROUP, retry=RetryPolicy(delays_seconds=[4], max_attempts=20))
def later(delivery: Delivery) -> None:
    """As an order; fails at first."""
    if delivery.attempt == 1:
        raise RuntimeError("the first attempt fails")
    order(delivery)


@subscriber(STEPS, group=GROUP, threads=2)
def step(delivery: Delivery) -> None:
    """Note the step."""
    Effect.objects.create(number=f"step-{delivery.key}")
