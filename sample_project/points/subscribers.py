"""The points' handlers."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from sample_project.events import OrderPaid
from sample_project.points.models import Entry


@subscriber(OrderPaid, group="points")
def credit(delivery: Delivery[OrderPaid]) -> None:
    """One point for every whole euro."""
    paid = delivery.body
    Entry.objects.create(order_id=paid.order_id, customer=paid.customer, points=int(paid.amount))
