"""What the scenarios of most cases have in common."""

from __future__ import annotations

from django.db import transaction

from outbox.contrib.django import publish
from tests.crash_kit.shop.models import Order


def place(topic: str, *numbers: int, customer: str = "ann") -> None:
    """Store orders and publish a message about each, in one transaction each."""
    for number in numbers:
        with transaction.atomic():
            Order.objects.create(number=number)
            publish(topic, {"number": number, "customer": customer}, key=number)


def orders() -> list[int]:
    """Return the numbers of the stored orders."""
    return sorted(Order.objects.values_list("number", flat=True))
