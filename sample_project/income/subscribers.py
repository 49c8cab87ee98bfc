"""The stages.

A stage's rows, its messages and its inbox row are one commit. An order counts once, whichever process is killed in
between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal

from outbox import Delivery, Message
from outbox.contrib.django import message, publish, publish_messages, subscriber
from sample_project.events import OrderPaid
from sample_project.income.models import CountedOrder, EnrichedOrder, ShownMinute, Window

# Orders from this total in euro on have this size.
SIZES = ((Decimal(50), "large"), (Decimal(20), "medium"), (Decimal(0), "small"))


@subscriber(OrderPaid, group="income.enrich")
def enrich(delivery: Delivery[OrderPaid]) -> None:
    """Add the size of an order and the minute of its payment; the time is that of the event, not of today's run."""
    paid = delivery.body
    order = EnrichedOrder.objects.create(
        order_id=paid.order_id,
        total=paid.amount,
        size=next(size for least, size in SIZES if paid.amount >= least),
        minute=paid.paid_at.replace(second=0, microsecond=0),
    )
    publish(
        "order.enriched",
        {"order_id": order.order_id, "total": str(paid.amount), "size": order.size, "minute": order.minute.isoformat()},
        key=order.order_id,
    )


@subscriber("order.enriched", group="income.windows", batch=50)
def add_up(deliveries: Sequence[Delivery]) -> None:
    """Add the orders of a batch to their minutes, and publish the new sums: one message per minute, all or none."""
    CountedOrder.objects.bulk_create(CountedOrder(order_id=delivery.body["order_id"]) for delivery in deliveries)
    by_minute: defaultdict[str, list[Decimal]] = defaultdict(list)
    for delivery in deliveries:
        by_minute[delivery.body["minute"]].append(Decimal(delivery.body["total"]))
    # In one order, so that two processes with the same minutes do not deadlock.
    publish_messages([_told(_add(minute, totals)) for minute, totals in sorted(by_minute.items())])


def _add(minute: str, totals: Sequence[Decimal]) -> Window:
    start = datetime.fromisoformat(minute)
    Window.objects.get_or_create(minute=start)
    window = Window.objects.select_for_update().get(minute=start)
    window.income += sum(totals)
    window.orders += len(totals)
    window.revision += 1
    window.save()
    return window


def _told(window: Window) -> Message:
    body = {"income": str(window.income), "orders": window.orders, "revision": window.revision}
    minute = window.minute.isoformat()
    return message("income.minute", {"minute": minute, **body}, key=f"{minute}/{window.revision}")


@subscriber("income.minute", group="income.chart")
def show(delivery: Delivery) -> None:
    """Keep the newest sum of a minute: sums of one minute may arrive in any order."""
    told = delivery.body
    minute = datetime.fromisoformat(told["minute"])
    ShownMinute.objects.get_or_create(minute=minute)
    ShownMinute.objects.filter(minute=minute, revision__lt=told["revision"]).update(
        income=Decimal(told["income"]), orders=told["orders"], revision=told["revision"]
    )
