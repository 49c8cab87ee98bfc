"""Values for every page."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from sample_project.cart import services as cart
from sample_project.storefront import customers


def shop(request: HttpRequest) -> dict[str, Any]:
    """The visitor and the size of the cart."""
    customer = customers.known(request)
    return {"customer": customer, "cart_count": cart.count(customer) if customer else 0}
