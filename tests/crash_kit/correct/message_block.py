"""The scenario uses a block of messages."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import message_transaction, subscriber
from tests.crash_kit.shop.models import Order, Payment
from tests.crash_kit.writing import orders

TOPIC = GROUP = "message_block"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    with transaction.atomic(), message_transaction() as block:
        Order.objects.create(number=1)
        Order.objects.create(number=2)
        block.publish(TOPIC, {"number": 1}, key=1)
        block.publish(TOPIC, {"number": 2}, key=2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
