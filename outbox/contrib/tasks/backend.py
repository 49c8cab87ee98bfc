"""The backend for TASKS: it enqueues tasks in the caller's transaction, reads results, and checks its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from uuid import UUID

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.db import router, transaction
from django.utils import timezone

from outbox import names
from outbox.contrib.django.publishing.publish import publish
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.settings.definition import Rule, or_none, read, seconds, setting, text, whole, wrong
from outbox.contrib.tasks.api import (
    BaseTaskBackend,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    task_backends,
    task_enqueued,
)
from outbox.errors import ConfigurationError, OutboxError
from outbox.retry import MAX_ATTEMPTS, RetryPolicy
from outbox.topic import MessageType

if TYPE_CHECKING:
    from outbox.contrib.tasks.models import TaskEntry

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NEEDED = frozenset({MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION})


def _delays(where: str, value: Any) -> Sequence[float]:
    allowed = "a list of numbers of seconds that is not empty"
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong(where, value, allowed)
    rule = seconds(0, most=names.MAX_DELAY_SECONDS)
    return [rule.check(f"{where}[{place}]", one) for place, one in enumerate(value)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """The options of the backend for Django's tasks."""

    topic: str = setting(
        "tasks", text("topic"), meaning="the topic of the task messages. Each backend needs a topic of its own"
    )
    threads: int = setting(
        8,
        whole(1, "tasks", most=names.MAX_CALLS),
        meaning="how many tasks of one queue run at the same time in one process",
    )
    timeout_seconds: float = setting(15 * 60.0, seconds(0.01), meaning="how long a task may run")
    max_attempts: int | None = setting(
        1,
        or_none(whole(1, "attempts", most=MAX_ATTEMPTS)),
        meaning="the maximum number of attempts of a failing task; `None`: no limit",
    )
    delays_seconds: Sequence[float] = setting(
        (10.0, 60.0, 600.0),
        Rule("a list of numbers of seconds, each at least 0", _delays, "seconds"),
        meaning="the waits between the attempts of a failing task; the last wait is used for all further attempts",
    )


def _topic_of(backend: object) -> str | None:
    return backend.settings.topic if isinstance(backend, OutboxBackend) else None


class OutboxBackend(BaseTaskBackend):
    """Stores a task as a row of the application's database and publishes a message for it. Subscribers run tasks."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    # Urgent tasks need a queue of their own, whose messages do not wait behind those of other tasks.
    supports_priority = False

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, dict(params))
        self.settings = read(TaskOptions, f"TASKS[{alias!r}]['OPTIONS']", self.options)
        try:
            self.retry = RetryPolicy(
                max_attempts=self.settings.max_attempts, delays_seconds=self.settings.delays_seconds
            )
            for group, queue in self.groups.items():
                names.check_group(group)
                names.check_tag(queue)
        except OutboxError as error:
            raise ConfigurationError(f"TASKS[{alias!r}]: {error}") from error

    @property
    def groups(self) -> dict[str, str]:
        """Map each consumer group to the name of its queue.

        The name is '' if QUEUES is empty, so that any name is allowed.
        """
        topic = self.settings.topic
        return {f"{topic}.{queue}": queue for queue in sorted(self.queues)} or {topic: ""}

    def enqueue(self, task: Task[_P, _R], args: Any, kwargs: Any) -> TaskResult[_P, _R]:
        """Store a call of the task. The task runs after the surrounding transaction has committed.

        Raises InvalidTask, or TypeError or ValueError for arguments that JSON cannot represent. Also raises the errors
        of `publish`.
        """
        from outbox.contrib.tasks.models import TaskEntry
        from outbox.contrib.tasks.results import result_of, storable

        self.validate_task(task)
        entry = TaskEntry(
            backend=self.alias,
            queue_name=task.queue_name,
            task_path=task.module_path,
            args=storable(list(args)),
            kwargs=storable(dict(kwargs)),
            run_after=task.run_after,
            enqueued_at=timezone.now(),
        )
        is_due = task.run_after is None or task.run_after <= entry.enqueued_at
        alias = router.db_for_write(TaskEntry)
        with transaction.atomic(using=alias):
            self.announce(entry, None if is_due else task.run_after, using=alias)
            entry.save(using=alias, force_insert=True)
        result = cast("TaskResult[_P, _R]", result_of(entry, task))
        task_enqueued.send(type(self), task_result=result)
        return result

    def announce(self, entry: TaskEntry, deliver_at: datetime | None, *, using: str) -> None:
        """Publish the next message of an entry in the open transaction on `using`, and record the message in the entry.

        If the caller has locked the entry, it must save the entry after this call.
        """
        if deliver_at is not None and timezone.is_naive(deliver_at):
            deliver_at = timezone.make_aware(deliver_at)
        body = {"task": str(entry.id), "attempts": entry.attempts}
        receipt = publish(
            self.settings.topic, body, key=entry.id, tag=entry.queue_name, deliver_at=deliver_at, using=using
        )
        entry.message_id, entry.announced_at = receipt.message_id, deliver_at or timezone.now()

    def group_of(self, queue: str) -> str:
        """Return the consumer group that runs the tasks of a queue."""
        return f"{self.settings.topic}.{queue}" if self.queues else self.settings.topic

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return the stored result of a call, read from the primary. Raises TaskResultDoesNotExist."""
        from outbox.contrib.tasks.models import TaskEntry
        from outbox.contrib.tasks.results import result_of

        try:
            wanted = UUID(result_id)
        except (ValueError, AttributeError, TypeError):
            raise TaskResultDoesNotExist(result_id) from None
        entries = TaskEntry.objects.using(router.db_for_write(TaskEntry))
        entry = entries.filter(pk=wanted, backend=self.alias).first()
        if entry is None:
            raise TaskResultDoesNotExist(result_id)
        return result_of(entry)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Return the problems that are found in the settings for tasks."""
        return list(self._complaints())

    def _complaints(self) -> Iterator[CheckMessage]:
        where = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("outbox.contrib.tasks"):
            yield Error(
                f"{where} uses the backend of outbox, but the app with the table of tasks is not installed.",
                hint="Add 'outbox.contrib.tasks' to INSTALLED_APPS and run migrate.",
                id="outbox_tasks.E001",
            )
        yield from self._topic(where)
        others = [item.alias for item in task_backends.all() if _topic_of(item) == self.settings.topic]
        if len(others) > 1:
            yield Error(
                f"the backends {', '.join(map(repr, others))} in TASKS share the topic {self.settings.topic!r}, so "
                "each backend would get messages of the others.",
                hint="In OPTIONS of each backend, set a topic that no other backend uses.",
                id="outbox_tasks.E003",
            )

    def _topic(self, where: str) -> Iterator[CheckMessage]:
        try:
            declared = get_settings().topics.get(self.settings.topic)
        except ConfigurationError:
            # If OUTBOX is invalid, `check_settings` reports the error, so this check reports nothing.
            return
        if declared is None or not declared.topic.types >= _NEEDED:
            yield Error(
                f"{where} sends its tasks through the topic {self.settings.topic!r}, which OUTBOX['TOPICS'] does not "
                f"declare with the types that tasks need.",
                hint=f"Add {self.settings.topic!r}: {{'types': ['NORMAL', 'DELAY', 'TRANSACTION']}} to "
                "OUTBOX['TOPICS'], and run `manage.py migrate` for the broker's alias.",
                id="outbox_tasks.E002",
            )
