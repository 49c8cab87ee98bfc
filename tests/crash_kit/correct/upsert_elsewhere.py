"""The effect on another alias is keyed by the message's number."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "upsert_elsewhere"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Receipt.objects.using("other").get_or_create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Receipt.objects.using("other").values_list("number", flat=True)) == orders()
