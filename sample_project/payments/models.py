"""Charges."""

from __future__ import annotations

from django.db import models


class Statement(models.Model):
    """The charges of a night: all that no earlier statement has."""

    charges = models.PositiveIntegerField()
    amount = models.DecimalField(max_digits=14, decimal_places=2)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"€ {self.amount} in {self.charges} charges"


class Charge(models.Model):
    """What the provider has charged for an order, in euro. `number` is the provider's number of the charge."""

    order_id = models.BigIntegerField(unique=True)
    number = models.TextField(unique=True)
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    statement = models.ForeignKey(Statement, on_delete=models.PROTECT, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"€ {self.amount} for order {self.order_id}"
