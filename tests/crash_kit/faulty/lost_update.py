"""Two handlers read the same balance and both store it increased by one."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Wallet
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "lost_update"
BREAKS = "Wallet.objects.get("


def prepare() -> None:
    Wallet.objects.create(customer="ann")


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    wallet = Wallet.objects.get(customer=delivery.body["customer"])
    wallet.balance += 1
    wallet.save()


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert Wallet.objects.get(customer="ann").balance == len(orders())
