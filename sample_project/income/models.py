"""The tables of the stages."""

from __future__ import annotations

from django.db import models


class EnrichedOrder(models.Model):
    """An order as the first stage passes it on. `minute` is the window of its payment."""

    order_id = models.BigIntegerField(unique=True)
    total = models.DecimalField(max_digits=12, decimal_places=2)
    size = models.TextField()
    minute = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.size} order {self.order_id}"


class CountedOrder(models.Model):
    """Records that the second stage has added an order to its window."""

    order_id = models.BigIntegerField(unique=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"order {self.order_id}, counted"


class _Minute(models.Model):
    """The income of a minute, in euro. `revision` grows with every change."""

    minute = models.DateTimeField(primary_key=True)
    income = models.DecimalField(max_digits=14, decimal_places=2, default=0)
    orders = models.PositiveIntegerField(default=0)
    revision = models.PositiveIntegerField(default=0)

    class Meta:
        abstract = True
        ordering = ("minute",)

    def __str__(self) -> str:
        return f"{self.minute:%H:%M}: € {self.income} in {self.orders} orders"


class Window(_Minute):
    """The second stage: the sum of a minute so far."""


class ShownMinute(_Minute):
    """The third stage: the newest sum received for a minute, for the page."""
