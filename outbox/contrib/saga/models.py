"""The model of the table `outbox_saga` in the application's database, with the progress of each saga."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from outbox.contrib.django.models import StorableTextField


class SagaState(models.TextChoices):
    """The state of a saga. In the states RUNNING and UNDOING, the next message continues the saga."""

    RUNNING = "running", "Running"
    WAITING = "waiting", "Waiting for an answer"
    UNDOING = "undoing", "Being undone"
    DONE = "done", "Done"
    UNDONE = "undone", "Undone"


class SagaProgress(models.Model):
    """The progress of one saga, which belongs to one record of the application.

    Only outbox.contrib.saga.steps writes this row, so saving the record does not reset the progress.

    `message_id` is the message that continues the saga: the message of the step, of its compensation, or of the
    deadline at `late_at`. A saga that has ended has its last one.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[SagaProgress]]

    saga = models.CharField(max_length=127)
    record = models.CharField(max_length=255)
    state = models.CharField(max_length=16, choices=SagaState)
    step = models.CharField(max_length=100)
    reason = StorableTextField(default="")
    changed_at = models.DateTimeField()
    late_at = models.DateTimeField(null=True)
    message_id = models.UUIDField(null=True)

    class Meta:
        app_label = "outbox_saga"
        db_table = "outbox_saga"
        verbose_name = "saga"
        constraints: ClassVar = [models.UniqueConstraint(fields=["saga", "record"], name="outbox_saga_of_record")]
        # The index serves queries that read all sagas in one state, ordered by the time of their last step.
        indexes: ClassVar = [models.Index(fields=["state", "changed_at"], name="outbox_saga_changed_at")]

    def __str__(self) -> str:
        return f"{self.saga} of {self.record}: {self.step} {self.state}"
