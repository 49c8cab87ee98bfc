"""A subscriber that kills its process: in a callback of message 40, and each time in the handler of message 77."""

from __future__ import annotations

import os
import signal

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.django.effects.own_transaction import transaction_id
from tests.django.shop.models import Effect


@subscriber("notes", group="notes", threads=1)
def note(delivery: Delivery) -> None:
    Effect.objects.create(number=f"{delivery.key}:{transaction_id()}")
    if delivery.key == "40":
        transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    if delivery.key == "77":
        os.kill(os.getpid(), signal.SIGKILL)
