"""The scenario publishes several messages in one call."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import message, publish_messages, subscriber
from tests.crash_kit.shop.models import Order, Payment
from tests.crash_kit.writing import orders

TOPIC = GROUP = "message_block"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
        Order.objects.create(number=2)
        publish_messages([message(TOPIC, {"number": number}, key=number) for number in (1, 2)])


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
