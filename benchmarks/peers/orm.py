"""Shared code of the Django peers: the request's block and how the database is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.db import transaction

from benchmarks.peers.body import BODY

Block = Callable[[int], None]


def prepare() -> None:
    django.setup()
    for alias in settings.DATABASES:
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)


def block(publish: Callable[[Any, dict[str, Any]], None] | None) -> Block:
    """One model write and, in the same transaction, one message: `publish(order, body)`; None: the write alone."""
    django.setup()
    from benchmarks.shop.models import Order

    def run(number: int) -> None:
        with transaction.atomic():
            order = Order.objects.create(customer=f"customer-{number}", total="129.90", status="paid")
            if publish is not None:
                publish(order, {"number": number, **BODY})

    return run


def write_effect(number: int) -> None:
    """The one model write of a handler with an inbox."""
    from benchmarks.shop.models import Effect

    Effect.objects.create(number=number)
