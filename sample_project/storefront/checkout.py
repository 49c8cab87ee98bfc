"""From cart to order. The storefront connects the two apps, which do not know each other."""

from __future__ import annotations

from django.db import transaction

from sample_project.cart import services as cart
from sample_project.orders.models import Order
from sample_project.orders.services import Line, place_order


def check_out(customer: str) -> Order | None:
    """Order the items in the cart; None if it is empty, as on a second click."""
    with transaction.atomic():
        items = list(cart.open_items(customer).select_for_update())
        if not items:
            return None
        order = place_order(
            customer,
            [
                Line(product_slug=i.product_slug, name=i.name, unit_price=i.unit_price, quantity=i.quantity)
                for i in items
            ],
        )
        cart.reserve(customer, [item.pk for item in items], order.pk)
    return order
