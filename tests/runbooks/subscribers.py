"""The handler of the shop: one effect per order. The variables SHOP_… make it the handler of another version."""

from __future__ import annotations

import os

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.retry import RetryPolicy
from outbox.subscription import Mode
from tests.django.shop.models import Effect

GROUP = os.environ.get("SHOP_GROUP", "mails")
START = os.environ.get("SHOP_START", "earliest")
MODE = Mode(os.environ.get("SHOP_MODE", "concurrent"))
TOPICS = os.environ.get("SHOP_TOPICS", "orders").split()
RETRY = RetryPolicy(delays_seconds=[0.5], max_attempts=200)


def mail(delivery: Delivery) -> None:
    """Note the order."""
    Effect.objects.create(number=delivery.key)


for topic in TOPICS:
    if MODE is Mode.CONCURRENT:
        subscriber(topic, group=GROUP, mode=MODE, start=START, retry=RETRY)(mail)
    else:
        subscriber(topic, group=GROUP, mode=MODE)(mail)
