"""The cart's handlers."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from sample_project.cart.models import Clearance, Item


@subscriber("order.paid", group="cart")
def clear(delivery: Delivery) -> None:
    """Remove the ordered items from the cart; items added meanwhile stay."""
    order_id, customer = delivery.body["order_id"], delivery.body["customer"]
    Item.objects.filter(customer=customer, order_id=order_id).delete()
    Clearance.objects.create(order_id=order_id, customer=customer)
