"""A message is refused for good; the others are handled."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.errors import PermanentError
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "dead_letter"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    if delivery.body["number"] == 2:
        raise PermanentError("no such order")
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == [number for number in orders() if number != 2]
