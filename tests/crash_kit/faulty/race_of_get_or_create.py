"""Two handlers of one customer create two accounts, because nothing keeps a customer unique."""

from __future__ import annotations

from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Account
from tests.crash_kit.writing import place

TOPIC = GROUP = "race_of_get_or_create"
BREAKS = "get_or_create("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    account, _ = Account.objects.get_or_create(customer=delivery.body["customer"])
    Account.objects.filter(pk=account.pk).update(balance=F("balance") + 1)


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert Account.objects.filter(customer="ann").count() <= 1
