"""The shop's web process: places orders until SIGTERM, and writes down what it was told about each of them.

A line of the file is the number of an order and `placed`, or the error that the publishing block has raised.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading

import django
from django.db import connections, transaction

STOP = threading.Event()


def main() -> None:
    django.setup()
    from outbox.contrib.django import publish
    from tests.django.shop.models import Order

    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    with open(sys.argv[1], "a", encoding="utf-8", buffering=1) as told:  # noqa: PTH123
        for count in itertools.count():
            number = f"{os.getpid()}-{count}"
            try:
                with transaction.atomic():
                    Order.objects.create(number=number)
                    publish(os.environ.get("SHOP_PUBLISH", "orders"), {"number": number}, key=number)
                told.write(f"{number} placed\n")
                pause = 0.01
            except Exception as error:
                told.write(f"{number} {type(error).__name__}: {error}".replace("\n", " ") + "\n")
                connections.close_all()
                pause = 0.1
            if STOP.wait(pause):
                break


if __name__ == "__main__":
    main()
