"""A subscriber whose effect shows in which transaction it was made."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.django.effects.own_transaction import transaction_id
from tests.django.shop.models import Effect


@subscriber("notes", group="notes", threads=2)
def note(delivery: Delivery) -> None:
    Effect.objects.create(number=f"{delivery.key}:{transaction_id()}")
