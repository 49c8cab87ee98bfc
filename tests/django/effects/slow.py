"""Subscribers with effects="outside", for worker processes of the tests."""

from __future__ import annotations

import os
import urllib.request

from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.retry import RetryPolicy
from tests.django.shop.models import Effect

RETRY = RetryPolicy(delays_seconds=[0.0], max_attempts=3)


def post(path: str, key: str) -> str:
    """Call the other system; an answer that is no success raises."""
    request = urllib.request.Request(f"{os.environ['TEST_PROVIDER']}/{path}", method="POST", headers={"Key": key})
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(response.read().decode())


@subscriber("orders", group="charging", effects="outside", retry=RETRY, threads=2)
def charge(delivery: ClaimedDelivery) -> None:
    """Two calls of the other system, then an effect and a message in one transaction."""
    delivery.step("charge", post, f"charge/{delivery.key}", delivery.step_key("charge"))
    delivery.step("mail", post, f"mail/{delivery.key}", delivery.step_key("mail"))
    with delivery.finish():
        Effect.objects.create(number=delivery.key)
        publish("payments", {}, key=delivery.key)


@subscriber("steps", group="charging", effects="outside", retry=RETRY, mode="key_ordered")
def ordered(delivery: ClaimedDelivery) -> None:
    """A call, then an effect that says at which place of its key the message is."""
    delivery.step("charge", post, f"ordered/{delivery.key}-{delivery.tag}", delivery.step_key("charge"))
    with delivery.finish():
        Effect.objects.create(number=f"{delivery.key}-{delivery.tag}")
