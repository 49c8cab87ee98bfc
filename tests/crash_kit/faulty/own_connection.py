"""The handler writes on a connection of its own, which commits by itself."""

from __future__ import annotations

import psycopg

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "own_connection"
BREAKS = "Receipt.objects.create("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    with psycopg.connect(alias_conninfo("default"), autocommit=True) as own:
        own.execute("INSERT INTO crash_shop_payment (number) VALUES (%s)", [delivery.body["number"]])
    Receipt.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
