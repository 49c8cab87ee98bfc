"""Without an inbox, a unique column makes the handler idempotent."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "unique_without_inbox"
OPTIONS = {"duplicates": True}


@subscriber(TOPIC, group=GROUP, idempotent=False)
def handle(delivery: Delivery) -> None:
    Receipt.objects.bulk_create([Receipt(number=delivery.body["number"])], ignore_conflicts=True)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Receipt.objects.values_list("number", flat=True)) == orders()
