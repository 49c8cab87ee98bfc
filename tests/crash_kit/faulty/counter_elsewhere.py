"""A counter in another database commits by itself."""

from __future__ import annotations

from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment, Wallet
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "counter_elsewhere"
BREAKS = ".update("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Wallet.objects.using("other").get_or_create(customer="ann")
    Wallet.objects.using("other").filter(customer="ann").update(balance=F("balance") + 1)
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    counted = Wallet.objects.using("other").filter(customer="ann").values_list("balance", flat=True).first() or 0
    assert counted == len(orders())
