"""The handler stores that it is done before it has done its work."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "marker_before_effect"
BREAKS = "Receipt.objects.create("


@subscriber(TOPIC, group=GROUP, idempotent=False)
def handle(delivery: Delivery) -> None:
    number = delivery.body["number"]
    if Receipt.objects.filter(number=number).exists():
        return
    Receipt.objects.create(number=number)
    Payment.objects.create(number=number)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
