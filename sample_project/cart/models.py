"""Carts, and the orders for which they were cleared."""

from __future__ import annotations

from django.db import models


class Item(models.Model):
    """An article in a customer's cart. `order_id` is set at checkout, so that exactly the ordered items are cleared."""

    customer = models.TextField()
    product_slug = models.TextField()
    name = models.TextField()
    unit_price = models.DecimalField(max_digits=8, decimal_places=2)
    quantity = models.PositiveIntegerField(default=1)
    order_id = models.BigIntegerField(null=True)

    class Meta:
        ordering = ("id",)
        constraints = (
            models.UniqueConstraint(
                fields=["customer", "product_slug"], condition=models.Q(order_id=None), name="cart_item_once"
            ),
        )
        indexes = (models.Index(fields=["order_id"], name="cart_item_order"),)

    def __str__(self) -> str:
        return f"{self.quantity} × {self.name} of {self.customer}"


class Clearance(models.Model):
    """The cart's part of a paid order is done: its items are removed."""

    order_id = models.BigIntegerField(unique=True)
    customer = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"cart of {self.customer} cleared for order {self.order_id}"
