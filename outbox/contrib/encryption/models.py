"""The model of the table `outbox_subject_key`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models


class SubjectKey(models.Model):
    """The key that encrypts the bodies of one subject's messages, encrypted by a key-encrypting key.

    The table is only on the alias OUTBOX['KEY_DATABASE']. The row of a deleted key stays, without subject and key.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[SubjectKey]]

    key_id = models.UUIDField(primary_key=True)
    subject = models.CharField(max_length=255, null=True, unique=True)
    wrapped = models.BinaryField(null=True)
    created_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_encryption"
        db_table = "outbox_subject_key"
        managed = False

    def __str__(self) -> str:
        return str(self.key_id)
