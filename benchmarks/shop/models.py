"""The rows of the benchmarks' application."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """The row that a request writes."""

    customer = models.CharField(max_length=100)
    total = models.DecimalField(max_digits=12, decimal_places=2)
    status = models.CharField(max_length=20)
    created_at = models.DateTimeField(auto_now_add=True)

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    class Meta:
        app_label = "shop"


class Effect(models.Model):
    """The row that a handler with an inbox writes."""

    number = models.BigIntegerField()

    objects: ClassVar[models.Manager[Effect]] = models.Manager()

    class Meta:
        app_label = "shop"
