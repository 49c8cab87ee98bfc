"""The row is stored by a thread, after the handler's own row if nothing crashes, and before it in all other runs."""

from __future__ import annotations

import multiprocessing
from threading import Thread

from django.db import connection

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment, Receipt
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "row_by_a_faster_thread"
BREAKS = "Payment.objects.create("
# Runs are forks of one process, so they share this value.
HAS_RUN = multiprocessing.Value("b", 0)


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    thread = Thread(target=store, args=[delivery.body["number"]])
    if HAS_RUN.value:
        thread.start()
        thread.join()
    Receipt.objects.create(number=delivery.body["number"])
    if not HAS_RUN.value:
        HAS_RUN.value = 1
        thread.start()
        thread.join()


def store(number: int) -> None:
    Payment.objects.create(number=number)
    connection.close()


def scenario() -> None:
    place(TOPIC, 1)


def check() -> None:
    assert sorted(Payment.objects.values_list("number", flat=True)) == orders()
