"""Logistics' handlers."""

from __future__ import annotations

import logging

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from sample_project import request_id
from sample_project.events import OrderPaid
from sample_project.logistics.models import Shipment

logger = logging.getLogger(__name__)


@subscriber(OrderPaid, group="logistics")
def ship(delivery: Delivery[OrderPaid]) -> None:
    """Create the shipment and publish it: the row, the message and the inbox row are one commit."""
    shipment = Shipment.objects.create(order_id=delivery.body.order_id)
    publish(
        "shipment.created",
        {"shipment_id": shipment.pk, "order_id": shipment.order_id},
        key=str(shipment.order_id),
        headers=request_id.headers(),
    )
    logger.info("order %d has shipment %d", shipment.order_id, shipment.pk)
