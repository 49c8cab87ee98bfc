"""The points' handlers."""

from __future__ import annotations

from decimal import Decimal

from outbox import Delivery
from outbox.contrib.django import subscriber
from sample_project.points.models import Entry


@subscriber("order.paid", group="points")
def credit(delivery: Delivery) -> None:
    """One point for every whole euro."""
    paid = delivery.body
    Entry.objects.create(order_id=paid["order_id"], customer=paid["customer"], points=int(Decimal(paid["total"])))
