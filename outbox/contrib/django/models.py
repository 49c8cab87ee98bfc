"""The models of the tables in the application's own databases: ledger, inbox, key locks, findings, sagas and audit."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models.functions import Now


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


class SagaState(models.TextChoices):
    """The state of a saga. In the states RUNNING and UNDOING, the next message continues the saga."""

    RUNNING = "running", "Running"
    WAITING = "waiting", "Waiting for an answer"
    UNDOING = "undoing", "Being undone"
    DONE = "done", "Done"
    UNDONE = "undone", "Undone"


class SagaProgress(models.Model):
    """The progress of one saga, which belongs to one record of the application.

    Only outbox.contrib.django.saga writes this row, so saving the record does not reset the progress.

    `message_id` is the message that continues the saga: the message of the step, of its compensation, or of the
    deadline at `late_at`.
    """

    saga = models.CharField(max_length=127)
    record = models.CharField(max_length=255)
    state = models.CharField(max_length=16, choices=SagaState)
    step = models.CharField(max_length=100)
    reason = models.TextField(default="")
    changed_at = models.DateTimeField()
    late_at = models.DateTimeField(null=True)
    message_id = models.UUIDField(null=True)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_saga"
        verbose_name = "saga"
        constraints: ClassVar = [models.UniqueConstraint(fields=["saga", "record"], name="outbox_saga_of_record")]
        # The index serves queries that read all sagas in one state, ordered by the time of their last step.
        indexes: ClassVar = [models.Index(fields=["state", "changed_at"], name="outbox_saga_changed_at")]

    def __str__(self) -> str:
        return f"{self.saga} of {self.record}: {self.step} {self.state}"


class KeyLock(models.Model):
    """One row per FIFO key that a transaction locks, on databases without transaction-scoped advisory locks."""

    key_hash = models.BigIntegerField(primary_key=True)
    taken = models.BigIntegerField(default=0)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_key_lock"

    def __str__(self) -> str:
        return str(self.key_hash)


class Finding(models.Model):
    """A finding of the last reconciliation run.

    `output` is the folder of the results. `manage.py outbox_reconcile --save` replaces all findings with the same
    `output`.
    """

    output = models.TextField()
    run = models.CharField(max_length=63)
    rule = models.CharField(max_length=255)
    group = models.CharField(max_length=127, blank=True, db_column="consumer_group")
    finding_class = models.CharField("class", max_length=15, db_column="class")
    severity = models.CharField(max_length=15)
    key = models.TextField()
    detail = models.TextField(blank=True)
    at = models.DateTimeField(null=True)
    first_seen = models.DateTimeField(null=True)
    message_id = models.CharField(max_length=63, blank=True)
    transaction_id = models.CharField(max_length=63, blank=True)
    row = models.TextField(blank=True)
    body = models.TextField(blank=True)

    class Meta:
        app_label = "outbox"
        db_table = "outbox_finding"
        verbose_name = "reconciliation finding"

    def __str__(self) -> str:
        return f"{self.finding_class} {self.key}"


class OperatorAction(models.Model):
    """An audit entry for an action that an operator ran by a command or on the operations page.

    The entry is stored before the action runs, and completed afterwards. If the outcome of an entry stays `begun`, its
    action was interrupted, and may or may not have taken effect.
    """

    class Outcome(models.TextChoices):
        """How the action ended."""

        BEGUN = "begun", "begun"
        DONE = "done", "done"
        FAILED = "failed", "failed"

    at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    who = models.CharField(max_length=255)
    why = models.TextField()
    action = models.CharField(max_length=63)
    subject = models.TextField()
    effect = models.TextField()
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
