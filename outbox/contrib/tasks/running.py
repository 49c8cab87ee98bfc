"""Runs tasks. A subscriber handles each message of a task in the transaction that also writes its inbox row."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from django.db import OperationalError, connections, router, transaction
from django.utils import timezone

from outbox.contrib.django.subscribers.registry import Subscriber, register
from outbox.contrib.tasks.api import TaskContext, TaskResult, task_backends, task_finished, task_started
from outbox.contrib.tasks.backend import OutboxBackend
from outbox.contrib.tasks.models import TaskEntry
from outbox.contrib.tasks.results import error_of, first_and_last, result_of, storable
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

Status = TaskEntry.Status

# The inbox sets a timeout that ends a transaction which is idle for most of a lease. While a task runs, the
# transaction may be idle for the whole time limit of the task, so replace this timeout.
_ALLOW_IDLING: Final = "SELECT set_config('idle_in_transaction_session_timeout', %s, true)"


def handler_for(backend: OutboxBackend, *, using: str) -> Callable[[Delivery], None]:
    """Return the handler for the messages of a backend. `using` is the alias of the entries' database.

    A READY entry always has a message, even after a failure. An entry whose last attempt has ended gets no further
    message.
    """

    def run_a_task(delivery: Delivery) -> None:
        _allow_idling(using, backend.settings.timeout_seconds)
        body = delivery.body
        entries = TaskEntry.objects.using(using).filter(
            pk=UUID(body["task"]), backend=backend.alias, status=Status.READY, attempts=body["attempts"]
        )
        if connections[using].features.has_select_for_update_skip_locked:
            # Databases without SKIP LOCKED (SQLite) need no lock: a handler writes its inbox row first, and SQLite
            # allows only one writer at a time.
            entries = entries.select_for_update(skip_locked=True)
        entry = entries.first()
        if entry is None:
            logger.debug(
                "message %s has no task to run, because the task was run or deleted before, or another message runs it",
                delivery.message_id,
            )
        else:
            _run(backend, entry, using=using)

    return run_a_task


def _allow_idling(using: str, seconds: float) -> None:
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(_ALLOW_IDLING, [str(round(seconds * 1000))])


def _run(backend: OutboxBackend, entry: TaskEntry, *, using: str) -> None:
    entry.status = Status.RUNNING
    entry.last_attempted_at = timezone.now()
    entry.started_at = entry.started_at or entry.last_attempted_at
    entry.attempts += 1
    entry.worker_ids = first_and_last([*entry.worker_ids, f"{socket.gethostname()}:{os.getpid()}"])
    result: TaskResult[..., Any] | None = None
    try:
        result = result_of(entry)
        task_started.send(type(backend), task_result=result)
        with transaction.atomic(using=using):
            entry.return_value = storable(_call(result))
    except OperationalError:
        # The error came from the database, not from the task. The attempt is rolled back, and the message is delivered
        # again.
        raise
    except (Exception, SystemExit) as error:
        entry.return_value = None
        entry.errors = first_and_last([*entry.errors, error_of(error)])
        # During a deployment, a task may be newer than the code of this process. This process then cannot start the
        # task.
        retry = backend.retry if result is not None else RetryPolicy()
        if retry.exhausted(entry.attempts):
            entry.status = Status.FAILED
            # `_finish` is called inside the exception handler, because signal receivers log the current exception.
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


def _current_error() -> BaseException | None:
    error = sys.exception()
    return None if error is None else printable(error)


def _finish(backend: OutboxBackend, entry: TaskEntry, *, using: str, known: bool = True) -> None:
    entry.finished_at = timezone.now()
    entry.save(using=using)
    if known:
        task_finished.send(type(backend), task_result=result_of(entry))
    else:
        logger.error(
            "task %s (%s) FAILED, because this process could not load the task",
            entry.id,
            entry.task_path,
            exc_info=_current_error(),
        )


def _try_again(backend: OutboxBackend, entry: TaskEntry, wait: timedelta, *, using: str) -> None:
    entry.status = Status.READY
    backend.announce(entry, timezone.now() + wait, using=using)
    entry.save(using=using)
    logger.warning(
        "task %s (%s) failed; its next attempt is in %s", entry.id, entry.task_path, wait, exc_info=_current_error()
    )


def register_backends() -> None:
    """Register the subscribers of all backends.

    Raises an error if the definition of a backend or its options is wrong.
    """
    using = router.db_for_write(TaskEntry)
    for backend in task_backends.all():
        if isinstance(backend, OutboxBackend):
            for group, queue in backend.groups.items():
                register(
                    Subscriber(
                        subscription=Subscription(
                            group=group,
                            topic=backend.settings.topic,
                            filter=queue,
                            threads=backend.settings.threads,
                            timeout_seconds=backend.settings.timeout_seconds,
                        ),
                        handler=handler_for(backend, using=using),
                        name=f"TASKS[{backend.alias!r}], queue {queue or '(any)'}",
                        using=using,
                    )
                )
