"""A producer of random transactions that goes on after errors of the broker: `random_driver PREFIX SEED COUNT FILE`.

A transaction commits, rolls back, or commits with a savepoint that is rolled back. It publishes its message before or
after its business write. `FILE` gets one line per transaction: its outcome, as the caller sees it, and its number.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from pathlib import Path

import django

THREADS = 4


class Undone(Exception):
    """Rolls a transaction back."""


def run(topic: str, number: str, chance: random.Random) -> str:
    """Run one transaction. Returns what the caller sees: committed, rolled back, or refused by the broker."""
    from django.db import transaction

    from outbox.errors import BrokerError

    kind = chance.choices(["commit", "roll back", "savepoint"], [70, 18, 12])[0]
    early = chance.random() < 0.5
    try:
        with transaction.atomic():
            _place(topic, number, early)
            if kind == "savepoint":
                with contextlib.suppress(Undone), transaction.atomic():
                    _place(topic, f"{number}-undone", early)
                    raise Undone
            if kind == "roll back":
                raise Undone
    except Undone:
        return "rolled back"
    except BrokerError:
        return "refused"
    return "committed"


def _place(topic: str, number: str, early: bool) -> None:
    from outbox.contrib.django import publish
    from tests.django.shop.models import Order

    if early:
        publish(topic, {"number": number}, key=number)
    Order.objects.create(number=number)
    if not early:
        publish(topic, {"number": number}, key=number)


def main() -> None:
    """Run COUNT transactions on several threads."""
    django.setup()
    from django.db import connection

    from outbox.contrib.django.engine.broker import flush

    prefix, seed, count, file = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    topic = os.environ["TEST_TOPICS"].split(",")[0]
    lock, waiting = threading.Lock(), iter(range(count))

    def work(number_of_thread: int) -> None:
        chance = random.Random(f"{seed}-{number_of_thread}")
        while True:
            with lock:
                number = next(waiting, None)
            if number is None:
                break
            outcome = run(topic, f"{prefix}-{number}", chance)
            with lock:
                said.write(f"{outcome},{prefix}-{number}\n")
        connection.close()

    # Each line is written at once, so a killed process leaves the lines of all transactions that it has finished.
    with file.open("a", buffering=1, encoding="utf-8") as said:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    flush(within_seconds=10)


if __name__ == "__main__":
    main()
