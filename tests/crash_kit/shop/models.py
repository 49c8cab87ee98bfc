"""Tables without unique constraints, so that a second effect is stored and seen. Two tables have one on purpose."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """What a scenario writes."""

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    number = models.IntegerField()
    status = models.CharField(max_length=16, default="new")
    revision = models.IntegerField(default=0)

    class Meta:
        app_label = "crash_shop"


class OrderLine(models.Model):
    """A second row of a scenario."""

    objects: ClassVar[models.Manager[OrderLine]] = models.Manager()

    number = models.IntegerField()

    class Meta:
        app_label = "crash_shop"


class Payment(models.Model):
    """What a handler writes."""

    objects: ClassVar[models.Manager[Payment]] = models.Manager()

    number = models.IntegerField()

    class Meta:
        app_label = "crash_shop"


class Receipt(models.Model):
    """What a second handler writes; a number exists once."""

    objects: ClassVar[models.Manager[Receipt]] = models.Manager()

    number = models.IntegerField(unique=True)

    class Meta:
        app_label = "crash_shop"


class Account(models.Model):
    """A balance per customer, which nothing keeps unique."""

    objects: ClassVar[models.Manager[Account]] = models.Manager()

    customer = models.CharField(max_length=16)
    balance = models.IntegerField(default=0)

    class Meta:
        app_label = "crash_shop"


class Wallet(models.Model):
    """A balance per customer; a customer has one."""

    objects: ClassVar[models.Manager[Wallet]] = models.Manager()

    customer = models.CharField(max_length=16, unique=True)
    balance = models.IntegerField(default=0)

    class Meta:
        app_label = "crash_shop"
