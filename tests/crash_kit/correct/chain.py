"""A handler stores a row and publishes the next message."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "chain"
GROUPS = [GROUP, f"{GROUP}.receipts"]


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Receipt.objects.create(number=delivery.body["number"])
    publish(f"{TOPIC}.receipts", delivery.body, key=delivery.body["number"])


@subscriber(f"{TOPIC}.receipts", group=f"{GROUP}.receipts")
def pay(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
    assert sorted(Receipt.objects.values_list("number", flat=True)) == orders()
