"""The row is stored by on_commit."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "row_in_on_commit"
BREAKS = ""


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    transaction.on_commit(lambda: Payment.objects.create(number=delivery.body["number"]))


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
