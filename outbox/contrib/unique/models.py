"""The model of the table `outbox_unique` in the application's database, with the unique keys that are held."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models


class UniqueKey(models.Model):
    """A unique key of a topic, and the message that holds the key until the time `until`.

    The local transaction that publishes the message writes this row. So the key is free again if the transaction or the
    savepoint rolls back.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[UniqueKey]]

    pk = models.CompositePrimaryKey("topic", "unique_key")
    topic = models.CharField(max_length=127)
    unique_key = models.CharField(max_length=255)
    message_id = models.UUIDField()
    until = models.DateTimeField()

    class Meta:
        app_label = "outbox_unique"
        db_table = "outbox_unique"
        indexes: ClassVar = [models.Index(fields=["until"], name="outbox_unique_until")]

    def __str__(self) -> str:
        return f"{self.topic} {self.unique_key}"
