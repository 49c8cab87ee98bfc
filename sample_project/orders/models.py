"""Orders and their lines."""

from __future__ import annotations

from decimal import Decimal

from django.db import models


class Status(models.TextChoices):
    """The progress of an order. It only moves forward: new, paid, shipped."""

    NEW = "new", "Awaiting payment"
    PAID = "paid", "Paid"
    SHIPPED = "shipped", "Shipped"


class Order(models.Model):
    """A customer's purchase. `total` is in euro; `paid_at` stays set from the payment on."""

    customer = models.TextField(db_index=True)
    total = models.DecimalField(max_digits=12, decimal_places=2)
    status = models.TextField(choices=Status, default=Status.NEW)
    created_at = models.DateTimeField(auto_now_add=True)
    paid_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-id",)
        constraints = (
            models.CheckConstraint(
                condition=models.Q(status=Status.NEW, paid_at=None)
                | models.Q(~models.Q(status=Status.NEW), paid_at__isnull=False),
                name="order_paid_at_when_paid",
            ),
        )

    def __str__(self) -> str:
        return f"order {self.pk} of {self.customer}"


class OrderLine(models.Model):
    """One article of an order, with its price at the time."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="lines")
    product_slug = models.TextField()
    name = models.TextField()
    unit_price = models.DecimalField(max_digits=8, decimal_places=2)
    quantity = models.PositiveIntegerField()

    class Meta:
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.quantity} × {self.name}"

    @property
    def amount(self) -> Decimal:
        """The price of the line in euro."""
        return self.unit_price * self.quantity
