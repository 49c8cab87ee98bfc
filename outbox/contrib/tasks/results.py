"""Converts entries of the table to results of the tasks API, and values to a form that the table can store."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from traceback import format_exception
from typing import Any, Final
from uuid import UUID

from django.db.models import Q
from django.utils.module_loading import import_string

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.contrib.tasks.api import Task, TaskError, TaskResult, TaskResultStatus
from outbox.contrib.tasks.models import TaskEntry
from outbox.errors import ConfigurationError
from outbox.retry import MAX_ATTEMPTS
from outbox.utils.safe_text import class_path, printable
from outbox.utils.safe_text import storable as storable_text

# Matches an escaped NUL, which PostgreSQL's jsonb refuses. The expression does not match an escaped backslash before
# "u0000".
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# The row keeps the errors and the workers of the first and of the last attempts. Each attempt writes the row again, so
# a task without a limit of attempts would otherwise write more and more.
_FIRST: Final = 2
_LAST: Final = 8


def storable(value: Any) -> Any:
    """Return the value after it was encoded to JSON and decoded again, which makes a list of a tuple.

    Raises TypeError or ValueError if the value cannot be stored as JSON.
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()
    if _NUL.search(text):
        raise ValueError("a text with a NUL character cannot be stored.")
    return json.loads(text)


def first_and_last(items: list[Any]) -> list[Any]:
    """Return the first two and the last eight items, or all items if there are no more."""
    return items if len(items) <= _FIRST + _LAST else [*items[:_FIRST], *items[-_LAST:]]


def error_of(error: BaseException) -> dict[str, str]:
    """Return the fields of a TaskError in the form that the table stores."""
    text = "".join(format_exception(printable(error)))
    return {
        "exception_class_path": class_path(error),
        "traceback": storable_text(text),
    }


def task_of(entry: TaskEntry) -> Task[..., Any]:
    """Return the task of an entry. Raises ConfigurationError if the task no longer exists."""
    try:
        found = import_string(entry.task_path)
    except ImportError as error:
        raise ConfigurationError(f"the task {entry.task_path!r} cannot be imported: {error}.") from error
    if not isinstance(found, Task):
        raise ConfigurationError(f"{entry.task_path!r} is not a task: decorate the function itself with @task.")
    return found.using(queue_name=entry.queue_name, run_after=entry.run_after, backend=entry.backend)


def result_of(entry: TaskEntry, task: Task[..., Any] | None = None) -> TaskResult[..., Any]:
    """Return the entry as a TaskResult. Raises ConfigurationError if the entry's task no longer exists."""
    workers = list(entry.worker_ids)
    # The tasks API counts the attempts by their workers. A task without a limit must not fill the memory with them.
    workers[_FIRST:_FIRST] = [""] * (min(entry.attempts, MAX_ATTEMPTS) - len(workers))
    result: TaskResult[..., Any] = TaskResult(
        task=task or task_of(entry),
        id=str(entry.id),
        status=TaskResultStatus(entry.status),
        enqueued_at=entry.enqueued_at,
        started_at=entry.started_at,
        finished_at=entry.finished_at,
        last_attempted_at=entry.last_attempted_at,
        args=entry.args,
        kwargs=entry.kwargs,
        backend=entry.backend,
        errors=[TaskError(**error) for error in entry.errors],
        worker_ids=workers,
    )
    # The tasks API itself also sets `_return_value` with object.__setattr__, because the class is frozen and its
    # constructor has no parameter for the return value.
    object.__setattr__(result, "_return_value", entry.return_value)
    return result


def erase_calls(rows: Rows, scope: Scope) -> int:
    """Erase arguments, results and errors of tasks. A task that has not run gets the status FAILED."""
    empty: dict[str, Any] = {"args": [], "kwargs": {}, "errors": [], "return_value": None}

    def is_about(row: Any) -> bool:
        values = {name: getattr(row, name) for name in empty}
        linked = (
            row.message_id in scope.message_ids
            or scope.is_key(str(row.pk))
            or scope.mentions(json.dumps(values, ensure_ascii=False))
        )
        return linked and values != empty

    def erased(row: Any) -> dict[str, Any]:
        over = {"status": "FAILED", "finished_at": row.finished_at or datetime.now(UTC)}
        return empty | (over if row.status in ("READY", "RUNNING") else {})

    # The key of a task's messages is its id. Retention removes the messages before the row.
    tasks = [scope.key] if scope.key is not None and _is_uuid(scope.key) else []
    mine = rows.filter(Q(message_id__in=scope.message_ids) | Q(pk__in=tasks))
    return saved(rows if scope.texts or scope.is_listed else mine, is_about, erased)


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
