"""The handler gets a batch."""

from __future__ import annotations

from collections.abc import Sequence

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "batch"


@subscriber(TOPIC, group=GROUP, batch=10)
def handle(deliveries: Sequence[Delivery]) -> None:
    Payment.objects.bulk_create(Payment(number=delivery.body["number"]) for delivery in deliveries)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
