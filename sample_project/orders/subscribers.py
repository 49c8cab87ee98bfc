"""What orders does when messages arrive."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from sample_project.orders.models import Order, Status


@subscriber("shipment.created", group="orders")
def shipped(delivery: Delivery) -> None:
    """Note that a paid order is on its way."""
    Order.objects.filter(pk=delivery.body["order_id"], status=Status.PAID).update(status=Status.SHIPPED)
