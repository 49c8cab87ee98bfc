"""The business tables of these tests."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """A row that has to agree with its message."""

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    number = models.CharField(max_length=64, unique=True)
    status = models.CharField(max_length=16, default="new")

    class Meta:
        app_label = "shop"


class Payment(models.Model):
    """Its constraint is checked by COMMIT itself, so that COMMIT can be made to fail."""

    objects: ClassVar[models.Manager[Payment]] = models.Manager()

    reference = models.CharField(max_length=64)

    class Meta:
        app_label = "shop"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["reference"], name="one_payment", deferrable=models.Deferrable.DEFERRED)
        ]


class Effect(models.Model):
    """The effect of a subscriber; without a unique constraint, so that a second effect would be seen."""

    objects: ClassVar[models.Manager[Effect]] = models.Manager()

    number = models.CharField(max_length=64)

    class Meta:
        app_label = "shop"
