"""The scenario is a function with the decorator of transactional messages."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber, transactional_message
from tests.crash_kit.shop.models import Order, Payment
from tests.crash_kit.writing import orders

TOPIC = GROUP = "decorator"


@transactional_message(TOPIC, key=lambda number: number, body=lambda number: {"number": number})
def store(number: int) -> None:
    Order.objects.create(number=number)


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    store(1)
    store(2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
