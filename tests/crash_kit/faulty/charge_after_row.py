"""The card is charged before the row is committed."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit import outside
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import place

TOPIC = GROUP = "charge_after_row"
BREAKS = "outside.charge("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])
    outside.charge(delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert len(outside.charges()) == len(set(outside.charges()))
