"""Finds READY entries without a message, reports them as a condition, and publishes a new message for each of them.

The handlers publish a message for every READY entry (running.py). An entry can lose its message in three ways: the
broker's database was restored; retention removed the message before its group consumed it; or an operator moved the
offset past the message.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, router, transaction
from django.utils import timezone

from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import NO_LIST, Concern, Declarations, Judged, Severity, Symptom
from outbox.broker.operations.trace import Whereabouts, whereabouts
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.tasks.api import task_backends
from outbox.contrib.tasks.backend import OutboxBackend
from outbox.contrib.tasks.models import TaskEntry

if TYPE_CHECKING:
    from outbox.broker.operations.state import BrokerState

logger = logging.getLogger(__name__)

Status = TaskEntry.Status

CONDITIONS: Final[Declarations[BrokerState]] = Declarations()
# A message is examined only after this time, because a worker may still be handling it.
_GRACE: Final = timedelta(seconds=60)
# The condition examines at most this many entries, which are the entries with the oldest messages. The periodic pass
# examines more entries.
_LOOKED_AT: Final = 200
_BATCH: Final = 1000
_BATCHES: Final = 20

_WHY: Final = {
    Whereabouts.PASSED: "the message of the task was consumed, but the task did not run",
    Whereabouts.GONE: "the broker does not have the message of the task",
    Whereabouts.DISCARDED: "the dead letter of the task was discarded",
}


@CONDITIONS.declare(
    meaning="Django tasks are READY, but the messages that would run them are gone.",
    next_step="A worker with the role `check` publishes the messages again within a minute. If a task must not run, "
    "delete its row from the table outbox_task.",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.HANDLERS,
    shown=NO_LIST,
)
def task_stranded(state: BrokerState) -> Iterator[Judged]:
    alias = router.db_for_write(TaskEntry)
    for entry, where in _stranded(state.run, _oldest(_LOOKED_AT, using=alias)):
        yield (
            Severity.WARNING,
            {
                "task": str(entry.pk),
                "path": entry.task_path,
                "queue": entry.queue_name,
                "message": str(entry.message_id),
                "why": _WHY[where],
            },
        )


def mend() -> Mapping[str, Any]:
    """Publish a new message for every READY entry without a message.

    If the dead letter of an entry was discarded, mark the entry FAILED instead.
    """
    if not get_settings().has_database:
        return {}
    alias = router.db_for_write(TaskEntry)
    counts = {"published": 0, "failed": 0}
    with broker_executor() as run:
        looked_at = 0
        for _ in range(_BATCHES):
            entries = _oldest(_BATCH, using=alias, offset=looked_at)
            found = list(_stranded(run, entries))
            for entry, where in found:
                if (done := _mend(entry, where, using=alias)) is not None:
                    counts[done] += 1
            # The next query skips only the entries that keep their old messages. An entry that got a new message is not
            # among the entries with the oldest messages any more, so the query need not skip it.
            looked_at += len(entries) - len(found)
            if len(entries) < _BATCH:
                break
    return counts


def _oldest(count: int, *, using: str, offset: int = 0) -> list[TaskEntry]:
    before = timezone.now() - _GRACE
    ready = TaskEntry.objects.using(using).filter(announced_at__lt=before, status=Status.READY)
    return list(ready.order_by("announced_at", "pk")[offset : offset + count])


def _stranded(run: Executor, entries: Sequence[TaskEntry]) -> Iterator[tuple[TaskEntry, Whereabouts]]:
    """Yield each entry without a message, and what happened to its last one."""
    by_group: dict[str, list[TaskEntry]] = defaultdict(list)
    for entry in entries:
        if (backend := _backend_of(entry)) is not None:
            by_group[backend.group_of(entry.queue_name)].append(entry)
    for group, mine in by_group.items():
        places = whereabouts(run, group, [entry.message_id for entry in mine])
        for entry in mine:
            # Read the entry again, because the entry's message may have run the task since the first query.
            if (where := places[entry.message_id]) in _WHY and _unlocked(entry, using=entry._state.db or "default"):
                yield entry, where


def _unlocked(entry: TaskEntry, *, using: str) -> TaskEntry | None:
    """Return the entry as it is in the database now, or None if the entry has changed or a handler runs it."""
    same = TaskEntry.objects.using(using).filter(
        pk=entry.pk, status=Status.READY, attempts=entry.attempts, message_id=entry.message_id
    )
    with transaction.atomic(using=using):
        if connections[using].features.has_select_for_update_skip_locked:
            same = same.select_for_update(skip_locked=True)
        return same.first()


def _mend(stranded: TaskEntry, where: Whereabouts, *, using: str) -> str | None:
    backend = _backend_of(stranded)
    assert backend is not None
    with transaction.atomic(using=using):
        entry = _unlocked(stranded, using=using)
        if entry is None:
            return None
        if where is Whereabouts.DISCARDED:
            entry.status, entry.finished_at = Status.FAILED, timezone.now()
            entry.save(using=using)
            logger.warning("task %s (%s) is FAILED: %s", entry.pk, entry.task_path, _WHY[where])
            return "failed"
        backend.announce(entry, None, using=using)
        entry.save(using=using, update_fields=["message_id", "announced_at"])
        logger.warning("task %s (%s) has a new message: %s", entry.pk, entry.task_path, _WHY[where])
        return "published"


def _backend_of(entry: TaskEntry) -> OutboxBackend | None:
    """Return the backend of an entry, or None if TASKS no longer has it."""
    found = [one for one in task_backends.all() if one.alias == entry.backend]
    return found[0] if found and isinstance(found[0], OutboxBackend) else None
