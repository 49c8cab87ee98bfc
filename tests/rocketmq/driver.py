"""A producer that is killed: one fixed piece of work under the faults of its environment. `driver PREFIX PATH`.

Its transactions commit (`c`), roll back (`r`), and roll back to a savepoint (`s`) inside one that commits (`d`). The
path `moving` adds to each round what is delivered later (`l`), and is slow. The path
`exits` does not flush: its ends are sent at the exit of the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import django

ROUNDS = 3
LATER_SECONDS = 6


class Undone(Exception):
    """Rolls a transaction back."""


def place(topic: str, number: str, *, decorated: bool, fail: bool = False, seconds: float = 0.0) -> None:
    """One order and its message."""
    from django.db import transaction

    from outbox.contrib.django import publish, transactional_message
    from tests.django.shop.models import Order

    def create(number: str) -> None:
        Order.objects.create(number=number)
        time.sleep(seconds)
        if fail:
            raise Undone

    if decorated:
        transactional_message(topic, key=lambda number: number, body={})(create)(number)
        return
    with transaction.atomic():
        publish(topic, {"number": number}, key=number)
        create(number)


def place_later(topic: str, number: str) -> None:
    """One order and its message, which is delivered after some seconds and takes no part in a transaction."""
    from outbox.contrib.django import publish
    from tests.django.shop.models import Order

    Order.objects.create(number=number)
    publish(topic, {"number": number}, key=number, delay=LATER_SECONDS, at_once=True)


def main() -> None:
    """Do the work; `rounds` of it."""
    django.setup()
    from django.db import transaction

    from outbox.contrib.django.engine.broker import flush

    prefix, how = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else ROUNDS
    topic, _, later = os.environ["TEST_TOPICS"].split(",")
    decorated, moving = how == "decorated", how == "moving"
    for number in range(rounds):
        if moving:
            place_later(later, f"{prefix}-l{number}")
        place(topic, f"{prefix}-c{number}", decorated=decorated, seconds=0.5 if moving else 0.0)
        with contextlib.suppress(Undone):
            place(topic, f"{prefix}-r{number}", decorated=decorated, fail=True)
        with transaction.atomic():
            place(topic, f"{prefix}-d{number}", decorated=decorated)
            with contextlib.suppress(Undone):
                place(topic, f"{prefix}-s{number}", decorated=decorated, fail=True)
    if how != "exits":
        flush(within_seconds=10)


if __name__ == "__main__":
    main()
