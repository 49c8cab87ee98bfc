"""The tables in the application's databases: notes about dead letters, and the rows and the lease of the relay."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models
from django.db.models.functions import Now

from outbox.contrib.django.models import StorableTextField


class DeadLetterNote(models.Model):
    """The facts about a dead letter that RocketMQ does not store: its error, and whether an operator settled it.

    RocketMQ stores the dead letter itself. The consumer that gives up a message writes the error. The actions `replay`
    and `discard` set `settled_until`: the time, in milliseconds since 1970 by RocketMQ's clock, at which the newest
    settled dead letter of this message was stored. A later dead letter of the message is not settled. The pruning pass
    deletes rows by age.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[DeadLetterNote]]

    group = models.CharField(max_length=127, db_column="consumer_group")
    message_id = models.UUIDField()
    attempts = models.IntegerField(default=0)
    error = StorableTextField(default="")
    noted_at = models.DateTimeField()
    settled_until = models.BigIntegerField(default=0)
    settled_at = models.DateTimeField(null=True)
    is_discarded = models.BooleanField(default=False)

    class Meta:
        app_label = "outbox_rocketmq"
        db_table = "outbox_dead_letter_note"
        verbose_name = "note about a dead letter of RocketMQ"
        verbose_name_plural = "notes about dead letters of RocketMQ"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["group", "message_id"], name="outbox_one_dead_letter_note")
        ]

    def __str__(self) -> str:
        return f"{self.group} {self.message_id}"


class RelayEntry(models.Model):
    """A message for RocketMQ that its relay must send, because RocketMQ does not store it as a half message.

    The local transaction writes the row, and the relay deletes it after RocketMQ has confirmed the message. The relay
    sends the messages of one `line` one after the other, in the order of `sequence`, and none of them before `due_at`.
    A row with `taken_at` may be at RocketMQ already. A row with `parked_at` was rejected, and waits for an operator.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[RelayEntry]]

    sequence = models.BigAutoField(primary_key=True)
    line = models.BigIntegerField()
    message_id = models.UUIDField(db_index=True)
    transaction_id = models.UUIDField()
    topic = models.CharField(max_length=127)
    key = models.CharField(max_length=255)
    tag = models.CharField(max_length=127)
    headers = models.JSONField()
    content_type = models.TextField()
    body = models.BinaryField()
    # The number of bytes of the body, so that the relay can choose rows without reading their bodies.
    size = models.IntegerField()
    born_at = models.DateTimeField()
    deliver_at = models.DateTimeField(null=True)
    due_at = models.DateTimeField(db_default=Now())
    taken_at = models.DateTimeField(null=True)
    attempts = models.IntegerField(default=0)
    error = StorableTextField(default="")
    parked_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_rocketmq"
        db_table = "outbox_relay"
        verbose_name = "message for the relay"
        verbose_name_plural = "messages for the relay"
        # The relay reads the first row of each line.
        indexes: ClassVar = [models.Index(fields=["line", "sequence"], name="outbox_relay_line")]

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}"

    @property
    def state(self) -> str:
        """`waiting`, `taken` (a relay may have sent it) or `parked` (RocketMQ has rejected it)."""
        if self.parked_at is not None:
            return "parked"
        return "waiting" if self.taken_at is None else "taken"


class RelayLease(models.Model):
    """The lease of the relay that sends the messages of this database; the table has at most one row."""

    singleton = models.BooleanField(primary_key=True, default=True)
    holder = models.UUIDField()
    expires_at = models.DateTimeField()

    class Meta:
        app_label = "outbox_rocketmq"
        db_table = "outbox_relay_lease"
        verbose_name = "lease of the relay"
        constraints: ClassVar = [models.CheckConstraint(condition=models.Q(singleton=True), name="outbox_one_relay")]

    def __str__(self) -> str:
        return str(self.holder)
