"""The handler collects messages in memory and stores them in pairs."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "collected_in_memory"
BREAKS = ""
waiting: list[int] = []


@subscriber(TOPIC, group=GROUP, threads=1)
def handle(delivery: Delivery) -> None:
    waiting.append(delivery.body["number"])
    if len(waiting) == 2:
        Payment.objects.bulk_create(Payment(number=number) for number in waiting)
        waiting.clear()


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    if len(orders()) == 2:
        assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
