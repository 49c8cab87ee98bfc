"""Running tasks: what a subscriber does with one message, within the transaction of its inbox row."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils import timezone

from outbox.contrib.django.tasks.api import TaskContext, TaskResult, task_finished, task_started
from outbox.contrib.django.tasks.backend import OutboxBackend
from outbox.contrib.django.tasks.models import TaskEntry
from outbox.contrib.django.tasks.results import error_of, result_of, storable
from outbox.message import Delivery
from outbox.retry import RetryPolicy

logger = logging.getLogger(__name__)

Status = TaskEntry.Status

# The inbox ends a transaction that idles for most of a lease; a task may, for as long as it may run.
_ALLOW_IDLING = "SELECT set_config('idle_in_transaction_session_timeout', %s, true)"


def handler_for(backend: OutboxBackend, queue: str, *, using: str) -> Callable[[Delivery], None]:
    """The handler of one queue's messages (of all queues: ''). `using`: the alias of the entries."""

    def run_a_task(delivery: Delivery) -> None:
        _allow_idling(using, backend.settings.timeout_seconds)
        entry = _claim(_ready(backend.alias, queue, using=using), delivery.body)
        if entry is None:
            logger.warning("no task is ready for message %s (its entry was deleted?)", delivery.message_id)
        else:
            _run(backend, entry, using=using)

    return run_a_task


def _allow_idling(using: str, seconds: float) -> None:
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(_ALLOW_IDLING, [str(round(seconds * 1000))])


def _ready(backend: str, queue: str, *, using: str) -> QuerySet[TaskEntry]:
    ready = TaskEntry.objects.using(using).filter(backend=backend, status=Status.READY)
    return ready.filter(queue_name=queue) if queue else ready


def _claim(ready: QuerySet[TaskEntry], announced: dict[str, Any]) -> TaskEntry | None:
    """The entry to run for a message: locked until the transaction ends, and passed over by everybody else.

    A more urgent one if there is one; else the message's own, so that one whose attempts break off (a process killed
    by it) stands in nobody's way; else, where another message has run that already, any.
    """
    own = ready.filter(pk=UUID(announced["task"]))
    # It is due, whatever this machine's clock says; unless it has been run since, and waits for another attempt.
    own.filter(attempts=announced["attempts"], is_due=False).update(is_due=True)
    if connections[ready.db].features.has_select_for_update_skip_locked:
        # Elsewhere (SQLite) the inbox row that was written first lets in one at a time.
        ready, own = ready.select_for_update(skip_locked=True), own.select_for_update(skip_locked=True)
    due = ready.filter(is_due=True).order_by("-priority", "enqueued_at", "pk")
    return (
        due.filter(priority__gt=announced["priority"]).first()
        or own.filter(attempts=announced["attempts"]).first()
        or due.first()
    )


def _run(backend: OutboxBackend, entry: TaskEntry, *, using: str) -> None:
    entry.status = Status.RUNNING
    entry.last_attempted_at = timezone.now()
    entry.started_at = entry.started_at or entry.last_attempted_at
    entry.attempts += 1
    entry.worker_ids = [*entry.worker_ids, f"{socket.gethostname()}:{os.getpid()}"]
    result: TaskResult[..., Any] | None = None
    try:
        result = result_of(entry)
        task_started.send(type(backend), task_result=result)
        with transaction.atomic(using=using):
            entry.return_value = storable(_call(result))
    except OperationalError:
        # The database's failure, not the task's: the whole attempt is rolled back and the message comes again.
        raise
    except (Exception, SystemExit) as error:
        entry.return_value = None
        entry.errors = [*entry.errors, error_of(error)]
        # What this process cannot start may be newer than its code, in a deployment that is under way.
        retry = backend.retry if result is not None else RetryPolicy()
        if retry.exhausted(entry.attempts):
            entry.status = Status.FAILED
            # Within the handler of the exception: receivers log it.
            _finish(backend, entry, using=using, known=result is not None)
        else:
            wait = timedelta(seconds=retry.delay_seconds(entry.attempts))
            _try_again(backend, entry, wait, using=using)
    else:
        entry.status = Status.SUCCESSFUL
        _finish(backend, entry, using=using)


def _call(result: TaskResult[..., Any]) -> Any:
    context = [TaskContext(task_result=result)] if result.task.takes_context else []
    return result.task.call(*context, *result.args, **result.kwargs)


def _finish(backend: OutboxBackend, entry: TaskEntry, *, using: str, known: bool = True) -> None:
    entry.finished_at = timezone.now()
    entry.save(using=using)
    if known:
        task_finished.send(type(backend), task_result=result_of(entry))
    else:
        logger.error("task %s (%s) could not be started", entry.id, entry.task_path, exc_info=True)


def _try_again(backend: OutboxBackend, entry: TaskEntry, wait: timedelta, *, using: str) -> None:
    entry.status = Status.READY
    entry.is_due = False
    entry.save(using=using)
    backend.announce(entry, timezone.now() + wait, using=using)
    logger.warning("task %s (%s) failed and runs again in %s", entry.id, entry.task_path, wait, exc_info=True)
