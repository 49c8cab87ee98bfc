"""Tasks on a real broker: both paths, threads, a worker that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from django.db import transaction
from django.db.models import Model
from django.test.utils import override_settings

from outbox.contrib.django.tasks.models import TaskEntry
from outbox.contrib.django.tasks.registration import register_backends
from outbox.contrib.django.worker.drain import drain
from tests.django.processes import ROOT, environment
from tests.django.shop import tasks
from tests.django.shop.models import Effect
from tests.django.state import rolled_back
from tests.support import eventually


@pytest.fixture(autouse=True)
def no_tasks(application: None, no_subscribers: None) -> Iterator[None]:
    register_backends()
    yield
    TaskEntry.objects.all().delete()


SETTINGS = "tests.django.task_settings"


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("number", flat=True))


def test_tasks_on_both_paths(path: str) -> None:
    with rolled_back():
        tasks.note.enqueue("undone")
    with transaction.atomic():
        tasks.note.enqueue("kept")
        failing = tasks.fail.enqueue("failing")
    assert drain().handled == 2
    assert effects() == ["kept"]
    assert sorted(entry.status for entry in TaskEntry.objects.all()) == ["FAILED", "SUCCESSFUL"]
    assert tasks.fail.get_result(failing.id).errors[0].exception_class is LookupError


def test_many_threads_run_each_task_once(databases: None) -> None:
    numbers = [f"{number:03}" for number in range(60)]
    with transaction.atomic():
        for number in numbers:
            tasks.note.using(priority=int(number)).enqueue(number)
    assert drain().handled == len(numbers)
    assert effects() == numbers
    assert set(TaskEntry.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


class ToLite:
    """Sends the tasks to SQLite, where no row can be locked."""

    def db_for_write(self, model: type[Model], **hints: object) -> str | None:
        return "lite" if model is TaskEntry else None


def test_many_threads_run_each_task_once_on_sqlite(databases: None) -> None:
    with override_settings(DATABASE_ROUTERS=[ToLite(), "outbox.contrib.django.routers.BrokerRouter"]):
        register_backends()
        numbers = [f"{number:03}" for number in range(20)]
        with transaction.atomic(using="lite"):
            for number in numbers:
                tasks.note.enqueue(number)
        assert drain().handled == len(numbers)
    assert effects() == numbers
    entries = TaskEntry.objects.using("lite")
    assert set(entries.values_list("status", flat=True)) == {"SUCCESSFUL"}
    entries.all().delete()


def test_a_task_may_leave_its_transaction_alone_for_longer_than_a_lease(
    databases: None, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(LEASE_SECONDS=1.0)
    result = tasks.pause.enqueue(1.5)
    assert drain().handled == 1
    result.refresh()
    assert result.is_finished, result.errors
    assert effects() == ["after", "before"]


@pytest.mark.parametrize("point", ["consumer.before_inbox_commit", "consumer.after_inbox_commit"])
def test_a_worker_killed_around_commit_runs_the_task_once(databases: None, point: str) -> None:
    result = tasks.note.enqueue("1")
    assert work(faults=f"{point}=kill") == -signal.SIGKILL

    def finished() -> bool:
        # The dead one's lease has to run out before its queues are anybody's.
        assert work() == 0
        result.refresh()
        return bool(result.is_finished)

    eventually(finished, within_seconds=60)
    assert work() == 0
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", "noted 1")
    assert effects() == ["1"]


def work(*, faults: str = "") -> int:
    """Drain in a process of its own; its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "django", "outbox_worker", "--drain"],
        env={**environment(outbox={"LEASE_SECONDS": 1}, faults=faults), "DJANGO_SETTINGS_MODULE": SETTINGS},
        cwd=ROOT,
        check=False,
        timeout=120,
    ).returncode
