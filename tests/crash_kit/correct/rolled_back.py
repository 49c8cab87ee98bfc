"""The transaction of a message is rolled back."""

from __future__ import annotations

import contextlib

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "rolled_back"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1)
    with contextlib.suppress(RuntimeError), transaction.atomic():
        Order.objects.create(number=2)
        publish(TOPIC, {"number": 2}, key=2)
        raise RuntimeError("no credit")


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
