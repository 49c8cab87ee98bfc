"""A subscriber whose effect shows in which transaction it was made (SUBSCRIBER_MODULE of test_shared_transactions)."""

from __future__ import annotations

from django.db import connection

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.django.shop.models import Effect


@subscriber("notes", group="notes", threads=2)
def note(delivery: Delivery) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text")
        (transaction_id,) = cursor.fetchone()
    Effect.objects.create(number=f"{delivery.key}:{transaction_id}")
