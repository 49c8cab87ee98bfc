"""A subscriber that kills its process: in a callback of message 40, and each time in the handler of message 77."""

from __future__ import annotations

import os
import signal

from django.db import connection, transaction

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.django.shop.models import Effect


@subscriber("notes", group="notes", threads=1)
def note(delivery: Delivery) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text")
        (transaction_id,) = cursor.fetchone()
    Effect.objects.create(number=f"{delivery.key}:{transaction_id}")
    if delivery.key == "40":
        transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    if delivery.key == "77":
        os.kill(os.getpid(), signal.SIGKILL)
