"""The handler ignores a state that is older than the stored one."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, Wallet

TOPIC = GROUP = "guarded_revision"
OPTIONS = {"shuffled": True, "duplicates": True}


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    new = delivery.body["revision"]
    Wallet.objects.get_or_create(customer="state", defaults={"balance": 0})
    Wallet.objects.filter(customer="state", balance__lt=new).update(balance=new)


def scenario() -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
    for revision in (1, 2, 3):
        with transaction.atomic():
            Order.objects.filter(number=1).update(revision=revision)
            publish(TOPIC, {"revision": revision}, key=1)


def check() -> None:
    stored = Wallet.objects.filter(customer="state").values_list("balance", flat=True).first() or 0
    order = Order.objects.filter(number=1).first()
    assert stored == (order.revision if order else 0)
