"""Business rows, and the effects of handlers. No constraint hides a second effect."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """A business row; its message has the same name."""

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    name = models.CharField(max_length=80, primary_key=True)
    # Its place among the rows of its key, if the transaction takes it after the publish call.
    number = models.IntegerField(default=0)


class Counter(models.Model):
    """The last number of a key. Its row is locked until COMMIT, so numbers follow the order of commits."""

    objects: ClassVar[models.Manager[Counter]] = models.Manager()

    key = models.CharField(max_length=40, primary_key=True)
    number = models.IntegerField(default=0)


class Effect(models.Model):
    """What one call of a handler did."""

    objects: ClassVar[models.Manager[Effect]] = models.Manager()

    group = models.CharField(max_length=40)
    name = models.CharField(max_length=80)
    number = models.IntegerField(default=0)


class Booking(models.Model):
    """The record of a saga."""

    objects: ClassVar[models.Manager[Booking]] = models.Manager()

    name = models.CharField(max_length=80, unique=True)
    refused = models.BooleanField()
    reserved = models.IntegerField(default=0)
    confirmed = models.IntegerField(default=0)
