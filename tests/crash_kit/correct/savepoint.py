"""A conflict is caught inside a savepoint."""

from __future__ import annotations

from django.db import IntegrityError, transaction

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "savepoint"


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    try:
        with transaction.atomic():
            Receipt.objects.create(number=7)
    except IntegrityError:
        pass
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
