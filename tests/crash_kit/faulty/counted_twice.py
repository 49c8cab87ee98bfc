"""The handler has no inbox, and counts a message that is delivered twice."""

from __future__ import annotations

from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Wallet
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "counted_twice"
BREAKS = ".update("
OPTIONS = {"duplicates": True}


def prepare() -> None:
    Wallet.objects.create(customer="ann")


@subscriber(TOPIC, group=GROUP, idempotent=False)
def handle(delivery: Delivery) -> None:
    Wallet.objects.filter(customer="ann").update(balance=F("balance") + 1)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert Wallet.objects.get(customer="ann").balance == len(orders())
