"""The scenario writes its rows in two transactions."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, OrderLine, Payment
from tests.crash_kit.writing import orders

TOPIC = GROUP = "two_transactions"
BREAKS = "with transaction.atomic():"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
        publish(TOPIC, {"number": 1}, key=1)
    with transaction.atomic():
        OrderLine.objects.create(number=1)


def check() -> None:
    assert sorted(OrderLine.objects.values_list("number", flat=True)) == orders()
