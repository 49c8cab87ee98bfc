"""The models of the tables in the application's own databases, from the ledger to the dead letters."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from django.db import models
from django.db.models.functions import Now

from outbox.utils.safe_text import storable


class StorableTextField(models.TextField):  # type: ignore[type-arg]
    """A text that other code has chosen, as a reason or an error: characters that no database stores are replaced."""

    def get_prep_value(self, value: Any) -> Any:
        """Return the text without NUL and halves of surrogate pairs."""
        value = super().get_prep_value(value)
        return storable(value) if isinstance(value, str) else value

    def deconstruct(self) -> tuple[str, str, Sequence[Any], dict[str, Any]]:
        """Return a TextField: the column is the same, so no migration is needed."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", args, kwargs


class LedgerEntry(models.Model):
    """One local transaction that published messages.

    The local transaction itself writes its row 'C', so the row is visible if and only if the transaction committed. A
    row 'R' is a tombstone. A check-back that finds no row writes the tombstone, and a later INSERT of 'C' then violates
    the primary key.
    """

    class LedgerState(models.TextChoices):
        """The outcome of a local transaction."""

        COMMITTED = "C", "committed"
        ROLLED_BACK = "R", "rolled back"

    transaction_id = models.UUIDField(primary_key=True)
    state = models.CharField(max_length=1, choices=LedgerState)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        app_label = "outbox"
        db_table = "outbox_ledger"
        verbose_name_plural = "ledger entries"

    def __str__(self) -> str:
        return f"{self.transaction_id} {self.get_state_display()}"


class LedgerIdentity(models.Model):
    """The ledger's id; the table has only one row.

    Half messages contain the id, so only this ledger answers their checks. Ledger entries with a transaction id below
    `pruned_before` may have been deleted, so the absence of such an entry proves nothing. Transaction ids are ordered
    by time, so an id can be compared with `pruned_before` without synchronised clocks.
    """

    singleton = models.BooleanField(primary_key=True, default=True)
    ledger_id = models.UUIDField(default=uuid.uuid4)
    pruned_before = models.UUIDField(null=True)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_ledger_identity"
        constraints: ClassVar = [models.CheckConstraint(condition=models.Q(singleton=True), name="outbox_one_ledger")]
        verbose_name_plural = "ledger identities"

    def __str__(self) -> str:
        return str(self.ledger_id)


class InboxEntry(models.Model):
    """A handled message whose effect is in this database. The handler's own transaction writes this row.

    The generation of a consumer group rises when an operator lets the group process messages again.
    """

    pk = models.CompositePrimaryKey("group", "generation", "message_id")
    group = models.CharField(max_length=127, db_column="consumer_group")
    generation = models.IntegerField()
    message_id = models.UUIDField()
    handled_at = models.DateTimeField(db_default=Now())

    class Meta:
        app_label = "outbox"
        db_table = "outbox_inbox"
        indexes: ClassVar = [models.Index(fields=["handled_at"], name="outbox_inbox_handled_at")]
        verbose_name_plural = "inbox entries"

    def __str__(self) -> str:
        return f"{self.group} {self.message_id}"


class ClaimEntry(models.Model):
    """A message that a handler with effects="outside" has begun and not finished.

    Each claim of the message has a `token` of its own. Only the token of this row may store steps and finish the
    message. An attempt that has failed leaves its row with `expires_at` in the past.
    """

    pk = models.CompositePrimaryKey("group", "generation", "message_id")
    group = models.CharField(max_length=127, db_column="consumer_group")
    generation = models.IntegerField()
    message_id = models.UUIDField()
    token = models.BigIntegerField()
    claimed_by = models.CharField(max_length=255)
    claimed_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    attempt = models.IntegerField()

    class Meta:
        app_label = "outbox"
        db_table = "outbox_claim"
        indexes: ClassVar = [models.Index(fields=["expires_at"], name="outbox_claim_expires_at")]
        verbose_name = "claim"

    def __str__(self) -> str:
        return f"{self.group} {self.message_id}"


class StepEntry(models.Model):
    """A step of a handler with effects="outside".

    `result` is the encoded result, or null while the step has no result. Only a step with once=True has a row before it
    has a result.
    """

    pk = models.CompositePrimaryKey("group", "generation", "message_id", "name")
    group = models.CharField(max_length=127, db_column="consumer_group")
    generation = models.IntegerField()
    message_id = models.UUIDField()
    name = models.CharField(max_length=127)
    attempt = models.IntegerField()
    begun_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    result = models.BinaryField(null=True)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_step"
        indexes: ClassVar = [models.Index(fields=["begun_at"], name="outbox_step_begun_at")]
        verbose_name = "step"

    def __str__(self) -> str:
        return f"{self.group} {self.message_id} {self.name}"


class KeyLock(models.Model):
    """One row per FIFO key that a transaction locks, on databases without transaction-scoped advisory locks."""

    key_hash = models.BigIntegerField(primary_key=True)
    taken = models.BigIntegerField(default=0)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_key_lock"

    def __str__(self) -> str:
        return str(self.key_hash)


class OperatorAction(models.Model):
    """An audit entry for an action that an operator ran by a command or on the operations page.

    The entry is stored before the action runs, and completed afterwards. If the outcome of an entry stays `begun`, its
    action was interrupted, and may or may not have taken effect.
    """

    class Outcome(models.TextChoices):
        BEGUN = "begun", "begun"
        DONE = "done", "done"
        FAILED = "failed", "failed"

    at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    who = models.CharField(max_length=255)
    why = StorableTextField()
    action = models.CharField(max_length=63)
    subject = StorableTextField()
    effect = StorableTextField()
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)
    outcome = models.CharField(max_length=15, choices=Outcome, default=Outcome.BEGUN)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_operator_action"
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("view_operations", "Can see the operations page"),
            ("act", "Can act on the operations page"),
            ("view_bodies", "Can see bodies and headers of messages"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.subject}"


class RaisedCondition(models.Model):
    """A condition that holds now for one subject, since `raised_at`. The pass `conditions` writes and deletes the rows.

    All processes of the service share the rows, so one process reports each change.
    """

    name = models.CharField(max_length=63)
    subject = models.CharField(max_length=400)
    severity = models.SmallIntegerField()
    raised_at = models.DateTimeField()
    seen_at = models.DateTimeField()

    class Meta:
        app_label = "outbox"
        db_table = "outbox_raised_condition"
        verbose_name = "raised condition"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name", "subject"], name="outbox_one_raised_condition")
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.subject}"
