"""What a claim costs beside the transaction of the inbox: messages per second, and CPU per message.

One consumer process handles the same messages with a handler in the inbox's transaction, with a claim, and with a claim
and one step, in turn. Each handler writes one row by the ORM. OUTBOX_BENCH_CLAIMS is the number of messages of a run.
"""

from __future__ import annotations

import os

from benchmarks.handling import Handled, consume, handle
from benchmarks.harness import REPEATS, Spread, child_arguments, server, table
from outbox.message import Delivery

COUNT = int(os.environ.get("OUTBOX_BENCH_CLAIMS", "1000"))
KINDS = ("inbox", "claim", "claim and step")


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\nclaims: {COUNT:,} messages, a row per message by the ORM, one process, {REPEATS} runs")
    found: dict[str, list[Handled]] = {kind: [] for kind in KINDS}
    with server() as url:
        for run in range(REPEATS):
            for number, kind in enumerate(KINDS):
                found[kind].append(handle("claims", url, f"claims_{run}_{number}", kind, COUNT))
    table(
        f"claims, {COUNT:,} messages (median, low to high; CPU of the consumer process and of the server)",
        [
            *("handler", "messages/s", "messages/s, of inbox", "CPU µs/message", "CPU, of inbox"),
            *("commits/message", "WAL bytes/message"),
        ],
        [row(kind, rows, found["inbox"]) for kind, rows in found.items()],
    )


def row(kind: str, rows: list[Handled], inbox: list[Handled]) -> list[str]:
    """One kind of handler; the ratios are against the inbox in the same run."""
    return [
        kind,
        f"{Spread.of([one.rate for one in rows])}",
        f"{Spread.of([one.rate / base.rate for one, base in zip(rows, inbox, strict=True)]):.2f}",
        f"{Spread.of([one.cpu_micros for one in rows])}",
        f"{Spread.of([one.cpu_micros / base.cpu_micros for one, base in zip(rows, inbox, strict=True)]):.2f}",
        f"{Spread.of([one.usage.commits / COUNT for one in rows]):.2f}",
        f"{Spread.of([one.usage.wal_bytes / COUNT for one in rows])}",
    ]


def child(kind: str, application: str, broker: str) -> None:
    from benchmarks.django_setup import TOPIC, configure

    configure(application, broker)
    from benchmarks.shop.models import Order
    from outbox.contrib.django import ClaimedDelivery, subscriber

    def store(number: int) -> None:
        Order(customer=f"customer-{number}", total="129.90", status="paid").save()

    if kind == "inbox":

        @subscriber(TOPIC, group="bench")
        def inside(delivery: Delivery) -> None:
            store(delivery.body["order_id"])

    else:

        @subscriber(TOPIC, group="bench", effects="outside")
        def outside(delivery: ClaimedDelivery) -> None:
            if kind == "claim and step":
                delivery.step("charge", int, 1)
            with delivery.finish():
                store(delivery.body["order_id"])

    consume("ready")


if __name__ == "__main__":
    main()
