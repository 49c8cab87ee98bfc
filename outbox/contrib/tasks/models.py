"""The model of the table `outbox_task` in the application's database, with the calls of tasks and their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models

from outbox.utils.ids import uuid7


class TaskEntry(models.Model):
    """One call of a task, written by `enqueue` in the caller's transaction.

    Every READY entry has its own message, with the id `message_id` and published at `announced_at`.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[TaskEntry]]

    class Status(models.TextChoices):
        """The states of a task, as django.tasks defines them.

        Only the task itself sees RUNNING: its entry is saved when the task has ended, together with the effects of the
        task.
        """

        READY = "READY", "ready"
        RUNNING = "RUNNING", "running"
        FAILED = "FAILED", "failed"
        SUCCESSFUL = "SUCCESSFUL", "successful"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    backend = models.CharField(max_length=127)
    queue_name = models.CharField(max_length=127)
    task_path = models.TextField()
    args: models.JSONField[Any, Any] = models.JSONField()
    kwargs: models.JSONField[Any, Any] = models.JSONField()
    status = models.CharField(max_length=15, choices=Status, default=Status.READY)
    message_id = models.UUIDField(editable=False)
    announced_at = models.DateTimeField(editable=False)
    attempts = models.PositiveIntegerField(default=0)
    run_after = models.DateTimeField(null=True)
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    worker_ids: models.JSONField[Any, Any] = models.JSONField(default=list)
    errors: models.JSONField[Any, Any] = models.JSONField(default=list)
    return_value: models.JSONField[Any, Any] = models.JSONField(null=True)

    class Meta:
        app_label = "outbox_tasks"
        db_table = "outbox_task"
        verbose_name = "task"
        indexes: ClassVar = [
            # This index serves queries that read the READY entries, ordered by `announced_at`.
            models.Index(fields=["status", "announced_at"], name="outbox_task_announced_at"),
            models.Index(fields=["finished_at"], name="outbox_task_finished_at"),
        ]

    def __str__(self) -> str:
        return f"{self.task_path} {self.id} {self.status}"
