"""The model of the table `outbox_endpoint` in the application's database, with the state of each endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from outbox.contrib.django.models import StorableTextField


class ForwardEndpoint(models.Model):
    """The state of the endpoint of one entry of OUTBOX['FORWARD'].

    An endpoint that says that it is gone is disabled until an operator enables it. Enabling raises `generation`, so a
    late answer to a request from before does not disable the endpoint again.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[ForwardEndpoint]]

    group = models.CharField(max_length=127, primary_key=True, db_column="consumer_group")
    generation = models.IntegerField(default=0)
    disabled_at = models.DateTimeField(null=True)
    disabled_reason = StorableTextField(default="")

    class Meta:
        app_label = "outbox_forwarding"
        db_table = "outbox_endpoint"

    def __str__(self) -> str:
        return self.group
