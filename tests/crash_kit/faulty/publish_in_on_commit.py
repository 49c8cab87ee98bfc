"""The message is published by on_commit, outside of the transaction."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, Payment
from tests.crash_kit.writing import orders

TOPIC = GROUP = "publish_in_on_commit"
BREAKS = "with transaction.atomic():"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
        transaction.on_commit(lambda: publish(TOPIC, {"number": 1}, key=1, at_once=True))


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
