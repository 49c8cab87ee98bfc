"""get_or_create on a unique column."""

from __future__ import annotations

from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Wallet
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "unique_wallet"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    wallet, _ = Wallet.objects.get_or_create(customer=delivery.body["customer"])
    Wallet.objects.filter(pk=wallet.pk).update(balance=F("balance") + 1)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    balances = list(Wallet.objects.values_list("balance", flat=True))
    assert sum(balances) == len(orders()) and len(balances) <= 1
