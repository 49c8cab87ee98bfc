"""Subscribers with inbox and one model write, in one consumer process: message by message, and a batch handler.

The pair in the same run writes the same rows without messages: one transaction each, and one per batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.handling import Handled, consume, handle
from benchmarks.harness import REPEATS, Spread, child_arguments, server, table
from outbox.message import Delivery

# How many messages, and how many of them a handler is given at once.
KINDS = {"single": (10_000, 1), "batch of 100": (50_000, 100)}


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\ninbox: a row per message by the ORM, once by the inbox, one process, {REPEATS} runs")
    consumed: dict[str, list[Handled]] = {kind: [] for kind in KINDS}
    with server() as url:
        for run in range(REPEATS):
            for number, (kind, (count, _)) in enumerate(KINDS.items()):
                consumed[kind].append(handle("inbox", url, f"inbox_{run}_{number}", kind, count))
    table(
        "inbox (median, low to high)",
        ["handler", "messages/s", "the rows alone, one thread/s", "ratio", "commits/message", "WAL bytes/message"],
        [
            [
                kind,
                f"{Spread.of([one.rate for one in found])}",
                f"{Spread.of([float(one.said) for one in found])}",
                f"{Spread.of([one.rate / float(one.said) for one in found]):.2f}",
                f"{Spread.of([one.usage.commits / KINDS[kind][0] for one in found]):.4f}",
                f"{Spread.of([one.usage.wal_bytes / KINDS[kind][0] for one in found])}",
            ]
            for kind, found in consumed.items()
        ],
    )


def child(kind: str, application: str, broker: str) -> None:
    from benchmarks.django_setup import TOPIC, configure

    configure(application, broker)
    from django.db import transaction

    from benchmarks.shop.models import Order
    from outbox.contrib.django import subscriber

    count, batch = KINDS[kind]

    def order(number: int) -> Order:
        return Order(customer=f"customer-{number}", total="129.90", status="paid")

    started = time.perf_counter()
    for start in range(0, count, batch):
        with transaction.atomic():
            if batch == 1:
                order(start).save()
            else:
                Order.objects.bulk_create([order(start + n) for n in range(batch)])
    rows_per_second = count / (time.perf_counter() - started)
    Order.objects.all().delete()

    if batch == 1:

        @subscriber(TOPIC, group="bench")
        def one(delivery: Delivery) -> None:
            order(delivery.body["order_id"]).save()

    else:

        @subscriber(TOPIC, group="bench", batch=batch)
        def many(deliveries: Sequence[Delivery]) -> None:
            Order.objects.bulk_create([order(delivery.body["order_id"]) for delivery in deliveries])

    consume(str(rows_per_second))


if __name__ == "__main__":
    main()
