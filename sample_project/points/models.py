"""Loyalty points."""

from __future__ import annotations

from django.db import models


class Entry(models.Model):
    """Points credited for one order; a customer's balance is their sum."""

    order_id = models.BigIntegerField(unique=True)
    customer = models.TextField(db_index=True)
    points = models.IntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "entries"

    def __str__(self) -> str:
        return f"{self.points} points of {self.customer} for order {self.order_id}"
