"""The cart's handlers."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from sample_project.cart.models import Clearance, Item
from sample_project.events import OrderPaid


@subscriber(OrderPaid, group="cart")
def clear(delivery: Delivery[OrderPaid]) -> None:
    """Remove the ordered items from the cart; items added meanwhile stay."""
    paid = delivery.body
    Item.objects.filter(customer=paid.customer, order_id=paid.order_id).delete()
    Clearance.objects.create(order_id=paid.order_id, customer=paid.customer)
