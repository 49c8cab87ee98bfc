"""A step that a crash interrupts is repeated, and the payment service gets no key that it could recognise."""

from __future__ import annotations

from outbox.contrib.django import ClaimedDelivery, subscriber
from tests.crash_kit import outside
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import place

TOPIC = GROUP = "claimed_charge_without_key"
BREAKS = 'delivery.step("charge", '


@subscriber(TOPIC, group=GROUP, effects="outside")
def handle(delivery: ClaimedDelivery) -> None:
    delivery.step("charge", outside.charge, delivery.body["number"])
    with delivery.finish():
        Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert len(outside.charges()) == len(set(outside.charges()))
