"""The handler stores the state of a message without looking whether it is newer."""

from __future__ import annotations

from django.db import transaction
from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order

TOPIC = GROUP = "last_write_wins"
BREAKS = "the messages in the order of seed"
OPTIONS = {"shuffled": True}


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Order.objects.filter(number=1).update(status=delivery.body["status"])


def scenario() -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
    for status in ("paid", "sent", "received"):
        with transaction.atomic():
            Order.objects.filter(number=1).update(revision=F("revision") + 1)
            publish(TOPIC, {"status": status}, key=1)


def check() -> None:
    order = Order.objects.filter(number=1).first()
    assert order is None or order.status == ("new", "paid", "sent", "received")[order.revision]
