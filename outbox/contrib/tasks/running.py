"""Runs tasks. A subscriber handles each message of a task in the transaction that also writes the message's inbox row.

Each READY row has a message of its own. The handler runs the most urgent due row, and locks only that row; if its own
row is still READY, it publishes the row's next message. If any message could run any row, a handler might hold two rows
while other messages find both locked and are consumed without effect: rows would stay READY for ever.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils import timezone

from outbox.contrib.tasks.api import TaskContext, TaskResult, task_finished, task_started
from outbox.contrib.tasks.backend import OutboxBackend
from outbox.contrib.tasks.models import TaskEntry
from outbox.contrib.tasks.results import error_of, result_of, storable
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

Status = TaskEntry.Status

# The inbox sets a timeout that ends a transaction which is idle for most of a lease. While a task runs, the
# transaction may be idle for the whole time limit of the task, so replace this timeout.
_ALLOW_IDLING: Final = "SELECT set_config('idle_in_transaction_session_timeout', %s, true)"

# If another handler runs the entry, the entry's next message is delivered after at most this time.
_LONGEST_WAIT_SECONDS: Final = 60


def handler_for(backend: OutboxBackend, queue: str, *, using: str) -> Callable[[Delivery], None]:
    """Return the handler for the messages of one queue, or of all queues if `queue` is ''.

    `using` is the alias of the entries' database. For each message the handler runs one entry: the message's own entry,
    or a more urgent entry that is due. The handler locks only the entry that it runs. If the message's own entry is
    still READY afterwards, the handler publishes the next message of this entry in the same transaction. So a READY
    entry always has a message, even after a failure. An entry whose last attempt has ended gets no further message.
    """

    def run_a_task(delivery: Delivery) -> None:
        _allow_idling(using, backend.settings.timeout_seconds)
        ready = _ready(backend.alias, queue, using=using)
        announced = ready.filter(pk=UUID(delivery.body["task"]), attempts=delivery.body["attempts"])
        own = announced.first()
        if own is None:
            logger.debug(
                "message %s has no task to run, because the task was run or deleted before", delivery.message_id
            )
        elif urgent := _locked(ready.filter(is_due=True, priority__gt=own.priority)):
            _run(backend, urgent, using=using)
            _announce_again(backend, announced, using=using, waits=0)
        elif entry := _locked(announced):
            _run(backend, entry, using=using)
        else:
            # Another handler runs the entry now. If that handler rolls back, only the next message of the entry can run
            # it.
            _announce_again(backend, announced, using=using, waits=delivery.body.get("waits", 0) + 1)

    return run_a_task


def _allow_idling(using: str, seconds: float) -> None:
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(_ALLOW_IDLING, [str(round(seconds * 1000))])


def _ready(backend: str, queue: str, *, using: str) -> QuerySet[TaskEntry]:
    ready = TaskEntry.objects.using(using).filter(backend=backend, status=Status.READY)
    return ready.filter(queue_name=queue) if queue else ready


def _locked(entries: QuerySet[TaskEntry]) -> TaskEntry | None:
    """Return the most urgent entry that no other handler runs, locked until the transaction ends."""
    if connections[entries.db].features.has_select_for_update_skip_locked:
        # Databases without SKIP LOCKED (SQLite) need no lock: a handler writes its inbox row first, and SQLite allows
        # only one writer at a time.
        entries = entries.select_for_update(skip_locked=True)
    return entries.order_by("-priority", "enqueued_at", "pk").first()


def _announce_again(backend: OutboxBackend, announced: QuerySet[TaskEntry], *, using: str, waits: int) -> None:
    """Publish the next message of an entry that has not run yet. If another message has run the entry, do nothing.

    `waits` is the number of consecutive messages of the entry that have found the entry locked. The delay of the next
    message grows with this number, up to a minute.
    """
    entry = _locked(announced)
    if entry is not None:
        # The message of the entry has arrived, so the entry is due. After this, handlers of other entries' messages may
        # also run the entry.
        entry.is_due = True
        backend.announce(entry, None, using=using)
        entry.save(using=using, update_fields=["is_due", "message_id", "announced_at"])
    elif (entry := announced.first()) is not None:
        wait = timedelta(seconds=min(2**waits, _LONGEST_WAIT_SECONDS))
        backend.announce(entry, timezone.now() + wait, using=using, waits=waits)


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
        # The error came from the database, not from the task. The attempt is rolled back, and the message is delivered
        # again.
        raise
    except (Exception, SystemExit) as error:
        entry.return_value = None
        entry.errors = [*entry.errors, error_of(error)]
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
    entry.is_due = False
    backend.announce(entry, timezone.now() + wait, using=using)
    entry.save(using=using)
    logger.warning(
        "task %s (%s) failed; its next attempt is in %s", entry.id, entry.task_path, wait, exc_info=_current_error()
    )
