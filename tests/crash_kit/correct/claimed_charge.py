"""A handler without a transaction gives the payment service the key of its step, and writes in `finish`."""

from __future__ import annotations

from outbox.contrib.django import ClaimedDelivery, subscriber
from tests.crash_kit import outside
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "claimed_charge"


@subscriber(TOPIC, group=GROUP, effects="outside")
def handle(delivery: ClaimedDelivery) -> None:
    delivery.step("charge", outside.charge_once, delivery.step_key("charge"))
    with delivery.finish():
        Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert len(outside.charges()) == len(set(outside.charges())) == len(orders())
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
