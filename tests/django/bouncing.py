"""The producer of test_bounce.py, as a process that may be killed: `python -m tests.django.bouncing COUNT SEED`.

Started again, it continues after the last order that it committed; a number alone decides whether it is aborted.
"""

from __future__ import annotations

import contextlib
import random
import sys

import django

from outbox.utils import faults

KEYS = 3
# The share of transactions whose end message is lost, so that only check-back can decide them.
LOST_ENDS = 0.2


def is_aborted(number: int) -> bool:
    """Every third of each key."""
    return number // KEYS % 3 == 2


class Aborted(Exception):
    """Rolls a transaction back on purpose."""


def place(number: int) -> None:
    """An order and its three messages, on three topics, as one transaction over them."""
    from django.db import transaction

    from outbox.contrib.django import message, publish_messages
    from tests.django.shop.models import Order

    with contextlib.suppress(Aborted), transaction.atomic():
        Order.objects.create(number=f"n{number}")
        publish_messages(
            [
                message("orders", {}, key=f"n{number}"),
                message("payments", {}, key=f"n{number}"),
                message("steps", {}, key=f"k{number % KEYS}", tag=str(number)),
            ]
        )
        if is_aborted(number):
            raise Aborted


def produce(count: int, seed: int) -> None:
    """Place what is still to be placed of `count` orders."""
    from outbox.contrib.django.engine.broker import flush
    from tests.django.shop.models import Order

    done = [int(number[1:]) for number in Order.objects.values_list("number", flat=True)]
    first = max(done, default=-1) + 1
    chance = random.Random(seed + first)
    for number in range(first, count):
        loses = chance.random() < LOST_ENDS
        if loses:
            faults.arm("producer.before_end=raise")
        place(number)
        if loses:
            flush(within_seconds=5)
            faults.arm("")


if __name__ == "__main__":
    django.setup()
    produce(int(sys.argv[1]), int(sys.argv[2]))
