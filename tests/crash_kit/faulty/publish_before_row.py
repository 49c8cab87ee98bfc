"""The message is published before the transaction of its row."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, Payment
from tests.crash_kit.writing import orders

TOPIC = GROUP = "publish_before_row"
BREAKS = "Order.objects.create("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    publish(TOPIC, {"number": 1}, key=1, at_once=True)
    Order.objects.create(number=1)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
