"""The model of the table `outbox_erased`."""

from __future__ import annotations

from django.db import models


class ErasureEntry(models.Model):
    """An erasure of personal data that was done in this database, as in the broker's table `erased`.

    A restore of a backup takes rows of this table away, so a worker finds the erasures that it must repeat.
    """

    pk = models.CompositePrimaryKey("kind", "topic", "value")
    kind = models.CharField(max_length=15)
    topic = models.CharField(max_length=127)
    value = models.CharField(max_length=64)
    erased_at = models.DateTimeField()

    class Meta:
        app_label = "outbox_erasure"
        db_table = "outbox_erased"
        verbose_name_plural = "erasure entries"

    def __str__(self) -> str:
        return f"{self.kind} {self.topic} {self.value}"
