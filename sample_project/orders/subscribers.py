"""Orders' handlers."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from sample_project.orders.models import Order, Status


@subscriber("shipment.created", group="orders")
def shipped(delivery: Delivery) -> None:
    """Record that a paid order is shipped."""
    Order.objects.filter(pk=delivery.body["order_id"], status=Status.PAID).update(status=Status.SHIPPED)
