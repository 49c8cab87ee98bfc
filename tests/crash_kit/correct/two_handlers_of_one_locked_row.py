"""Handlers of two groups lock the balance that both change."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Wallet
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "two_handlers_of_one_locked_row"
GROUPS = [GROUP, f"{GROUP}.bonus"]


def prepare() -> None:
    Wallet.objects.create(customer="ann")


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    wallet = Wallet.objects.select_for_update().get(customer=delivery.body["customer"])
    wallet.balance += 1
    wallet.save()


@subscriber(TOPIC, group=f"{GROUP}.bonus")
def give_bonus(delivery: Delivery) -> None:
    wallet = Wallet.objects.select_for_update().get(customer=delivery.body["customer"])
    wallet.balance += 1
    wallet.save()


def scenario() -> None:
    place(TOPIC, 1)


def check() -> None:
    assert Wallet.objects.get(customer="ann").balance == 2 * len(orders())
