"""An async handler without an inbox awaits two statements, each of which commits by itself."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "awaited_without_inbox"
BREAKS = "@subscriber(TOPIC, group=GROUP, idempotent=False)"


@subscriber(TOPIC, group=GROUP, idempotent=False)
async def handle(delivery: Delivery) -> None:
    number = delivery.body["number"]
    if await Receipt.objects.filter(number=number).aexists():
        return
    await Receipt.objects.acreate(number=number)
    await Payment.objects.acreate(number=number)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
