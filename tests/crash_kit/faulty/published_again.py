"""A handler without an inbox publishes for each delivery, and the next handler counts the messages."""

from __future__ import annotations

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "published_again"
GROUPS = [GROUP, f"{GROUP}.receipts"]
BREAKS = ""
# The second delivery is the only one: no process is killed.
OPTIONS = {"duplicates": True, "most_kills": 0}


@subscriber(TOPIC, group=GROUP, idempotent=False)
def handle(delivery: Delivery) -> None:
    with transaction.atomic():
        publish("chain.receipts", delivery.body, key=delivery.key)


@subscriber("chain.receipts", group=f"{GROUP}.receipts")
def store(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
