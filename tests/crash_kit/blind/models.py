"""The tables of the shop."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import uuid4

from django.db import models


class Product(models.Model):
    objects: ClassVar[models.Manager[Product]] = models.Manager()

    number = models.CharField(max_length=20, unique=True)
    price = models.IntegerField(default=0)
    hidden = models.BooleanField(default=False)

    class Meta:
        app_label = "blind"


class Customer(models.Model):
    objects: ClassVar[models.Manager[Customer]] = models.Manager()

    email = models.CharField(max_length=64, unique=True)
    name = models.CharField(max_length=64, default="")

    class Meta:
        app_label = "blind"


class Order(models.Model):
    objects: ClassVar[models.Manager[Order]] = models.Manager()

    number = models.CharField(max_length=20, unique=True)
    status = models.CharField(max_length=20, default="new")
    customer = models.CharField(max_length=64, default="")
    amount = models.IntegerField(default=100)
    payment = models.CharField(max_length=64, default="")

    class Meta:
        app_label = "blind"


class Shipment(models.Model):
    objects: ClassVar[models.Manager[Shipment]] = models.Manager()

    order = models.CharField(max_length=20)

    class Meta:
        app_label = "blind"


class Label(models.Model):
    objects: ClassVar[models.Manager[Label]] = models.Manager()

    order = models.CharField(max_length=20)
    text = models.CharField(max_length=64)

    class Meta:
        app_label = "blind"


class Account(models.Model):
    objects: ClassVar[models.Manager[Account]] = models.Manager()

    owner = models.CharField(max_length=20, unique=True)
    points = models.IntegerField(default=0)

    class Meta:
        app_label = "blind"


class Handled(models.Model):
    """A message that has been handled."""

    objects: ClassVar[models.Manager[Handled]] = models.Manager()

    message = models.UUIDField(unique=True)

    class Meta:
        app_label = "blind"


class Coupon(models.Model):
    objects: ClassVar[models.Manager[Coupon]] = models.Manager()

    code = models.CharField(max_length=20, unique=True)
    left = models.IntegerField(default=1)

    class Meta:
        app_label = "blind"


class Redemption(models.Model):
    objects: ClassVar[models.Manager[Redemption]] = models.Manager()

    coupon = models.CharField(max_length=20)
    order = models.CharField(max_length=20)

    class Meta:
        app_label = "blind"


class Basket(models.Model):
    objects: ClassVar[models.Manager[Basket]] = models.Manager()

    number = models.CharField(max_length=20, unique=True)
    country = models.CharField(max_length=2, default="de")

    class Meta:
        app_label = "blind"


class BasketLine(models.Model):
    objects: ClassVar[models.Manager[BasketLine]] = models.Manager()

    basket = models.CharField(max_length=20)
    amount = models.IntegerField()

    class Meta:
        app_label = "blind"


class TaxRate(models.Model):
    objects: ClassVar[models.Manager[TaxRate]] = models.Manager()

    country = models.CharField(max_length=2, unique=True)
    percent = models.IntegerField()

    class Meta:
        app_label = "blind"


class Invoice(models.Model):
    objects: ClassVar[models.Manager[Invoice]] = models.Manager()

    basket = models.CharField(max_length=20)
    total = models.IntegerField()

    class Meta:
        app_label = "blind"


class LineByReference(models.Model):
    """A line of an order; its reference is unique."""

    objects: ClassVar[models.Manager[LineByReference]] = models.Manager()

    reference = models.UUIDField(unique=True, default=uuid4)
    order = models.CharField(max_length=20)
    position = models.IntegerField()

    class Meta:
        app_label = "blind"


class LineByPosition(models.Model):
    """A line of an order; its position in the order is unique."""

    objects: ClassVar[models.Manager[LineByPosition]] = models.Manager()

    reference = models.UUIDField(default=uuid4)
    order = models.CharField(max_length=20)
    position = models.IntegerField()

    class Meta:
        app_label = "blind"
        constraints: ClassVar = [models.UniqueConstraint(fields=["order", "position"], name="blind_one_line")]


class Parcel(models.Model):
    objects: ClassVar[models.Manager[Parcel]] = models.Manager()

    order = models.CharField(max_length=20)
    shipped = models.BooleanField(default=False)

    class Meta:
        app_label = "blind"


class Document(models.Model):
    objects: ClassVar[models.Manager[Document]] = models.Manager()

    number = models.CharField(max_length=20, unique=True)
    files: models.JSONField[Any, Any] = models.JSONField(default=list)

    class Meta:
        app_label = "blind"


class Trip(models.Model):
    """The record of the sagas."""

    objects: ClassVar[models.Manager[Trip]] = models.Manager()

    guest = models.CharField(max_length=64)
    charged = models.IntegerField(default=0)
    refunded = models.BooleanField(default=False)
    ticket = models.CharField(max_length=20, default="")

    class Meta:
        app_label = "blind"


class ReportLine(models.Model):
    """A row for the accountants. It is in the database `reports`."""

    objects: ClassVar[models.Manager[ReportLine]] = models.Manager()

    order = models.CharField(max_length=20)
    amount = models.IntegerField()
    message = models.UUIDField(unique=True, null=True)

    class Meta:
        app_label = "blind"
