from __future__ import annotations

from typing import ClassVar

from django.db import models


class Room(models.Model):
    objects: ClassVar[models.Manager[Room]] = models.Manager()

    number = models.CharField(max_length=8, unique=True)
    free = models.BooleanField(default=True)


class Booking(models.Model):
    objects: ClassVar[models.Manager[Booking]] = models.Manager()

    room = models.ForeignKey(Room, on_delete=models.PROTECT)
    guest = models.CharField(max_length=64)
    charged = models.IntegerField(default=0)  # what the guest has paid, less what was given back
