"""The row is stored by a thread, in a transaction of its own."""

from __future__ import annotations

from threading import Thread

from django.db import connection

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "row_by_a_thread"
BREAKS = "Payment.objects.create("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    thread = Thread(target=store, args=[delivery.body["number"]])
    thread.start()
    thread.join()
    Receipt.objects.create(number=delivery.body["number"])


def store(number: int) -> None:
    Payment.objects.create(number=number)
    connection.close()


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
