"""The handler of this project."""

from __future__ import annotations

from benchmarks.scenarios.django_side import write_effect
from outbox.contrib.django import subscriber
from outbox.message import Delivery


@subscriber("order.paid", group="scenarios")
def paid(delivery: Delivery) -> None:
    write_effect(delivery.body["order"])
