"""Shipments."""

from __future__ import annotations

from django.db import models


class Shipment(models.Model):
    """A parcel to be sent. This app knows an order only by its number; the order is in another app."""

    order_id = models.BigIntegerField(unique=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"shipment of order {self.order_id}"
