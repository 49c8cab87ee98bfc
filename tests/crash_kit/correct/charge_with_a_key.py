"""The payment service ignores a number that it knows."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit import outside
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "charge_with_a_key"


@subscriber(TOPIC, group=GROUP, threads=1)
def handle(delivery: Delivery) -> None:
    outside.charge_once(delivery.body["number"])
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(outside.charges(), key=str) == orders()
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
