"""The tables of the shop in the documents."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """An order, as the examples save and change it."""

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    number = models.CharField(max_length=40, null=True, unique=True)
    status = models.CharField(max_length=20, default="placed")
    customer_id = models.IntegerField(null=True)
    amount = models.IntegerField(default=0)
    payment = models.CharField(max_length=40, default="")

    class Meta:
        app_label = "pages"


class Shipment(models.Model):
    objects: ClassVar[models.Manager[Shipment]] = models.Manager()

    order_id = models.BigIntegerField()

    class Meta:
        app_label = "pages"


class Points(models.Model):
    objects: ClassVar[models.Manager[Points]] = models.Manager()

    order_id = models.BigIntegerField(default=0)
    points = models.IntegerField(default=0)

    class Meta:
        app_label = "pages"


class Step(models.Model):
    objects: ClassVar[models.Manager[Step]] = models.Manager()

    order_id = models.BigIntegerField()
    step = models.CharField(max_length=20)

    class Meta:
        app_label = "pages"


class Mail(models.Model):
    objects: ClassVar[models.Manager[Mail]] = models.Manager()

    text = models.CharField(max_length=100)

    class Meta:
        app_label = "pages"


class Report(models.Model):
    objects: ClassVar[models.Manager[Report]] = models.Manager()

    until = models.CharField(max_length=40)

    class Meta:
        app_label = "pages"
