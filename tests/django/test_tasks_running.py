"""Tasks on a real broker: both paths, threads, a worker that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Model
from django.test.utils import override_settings
from django.utils import timezone

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.worker.drain import drain, queue_messages
from outbox.contrib.tasks import stranded
from outbox.contrib.tasks.models import TaskEntry
from outbox.contrib.tasks.results import error_of
from outbox.contrib.tasks.running import register_backends
from outbox.subscription import Subscription
from tests.django.processes import ROOT, environment, process
from tests.django.shop import tasks
from tests.django.shop.models import Effect
from tests.django.state import rolled_back
from tests.hostile import FAILURES
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


def run_each_task_once(alias: str) -> None:
    """Run many tasks in many threads, with the entries in this database."""
    register_backends()
    numbers = [f"{number:03}" for number in range(40)]
    with transaction.atomic(using=alias):
        for number in numbers:
            tasks.note.enqueue(number)
    assert drain().handled == len(numbers)
    assert effects() == numbers
    entries = TaskEntry.objects.using(alias)
    assert set(entries.values_list("status", flat=True)) == {"SUCCESSFUL"}
    entries.all().delete()


def test_many_threads_run_each_task_once(databases: None) -> None:
    run_each_task_once("default")


class ToLite:
    """Sends the tasks to SQLite, where no row can be locked."""

    def db_for_write(self, model: type[Model], **hints: object) -> str | None:
        return "lite" if model is TaskEntry else None


def test_many_threads_run_each_task_once_on_sqlite(databases: None) -> None:
    with override_settings(DATABASE_ROUTERS=[ToLite(), "outbox.contrib.django.routers.BrokerRouter"]):
        run_each_task_once("lite")


def test_a_task_may_leave_its_transaction_alone_for_longer_than_a_lease(
    databases: None, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(LEASE_SECONDS=1.0)
    result = tasks.pause.enqueue(1.5)
    assert drain().handled == 1
    result.refresh()
    assert result.is_finished, result.errors
    assert effects() == ["after", "before"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["consumer.before_inbox_commit", "consumer.after_inbox_commit"])
def test_a_worker_killed_around_commit_runs_the_task_once(databases: None, point: str) -> None:
    result = tasks.note.enqueue("1")
    assert work(faults=f"{point}=kill") == -signal.SIGKILL

    def finished() -> bool:
        # The lease of the dead process has to expire before another process may own its queues.
        assert work() == 0
        result.refresh()
        return bool(result.is_finished)

    eventually(finished, within_seconds=60)
    assert work() == 0
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", "noted 1")
    assert effects() == ["1"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_that_are_killed_run_every_task_once(databases: None) -> None:
    """Slow, postponed and retried tasks in one queue; a consumer is killed three times while they run.

    No process has the role `check`: a pass that publishes messages again would hide an entry without one.
    """
    numbers = [f"{number:03}" for number in range(60)]
    for number in numbers:
        soon = timezone.now() + timedelta(seconds=int(number) % 7)
        tasks.note.using(run_after=soon).enqueue(f"postponed {number}")
        tasks.fail_first.enqueue(f"retried {number}")
        tasks.nap.enqueue(f"slow {number}")
    started: Any = {"variables": {"DJANGO_SETTINGS_MODULE": SETTINGS}, "quiet": True}
    child = ["-m", "outbox.contrib.django.worker.child"]
    with process([*child, "broker"], **started), process([*child, "consumer"], **started):
        for killed in range(3):
            with process([*child, "consumer"], **started) as victim:
                eventually(lambda: Effect.objects.count() >= 30 * (killed + 1), within_seconds=60)  # noqa: B023
                victim.kill()
        with process([*child, "consumer"], **started):
            eventually(
                lambda: not [run_check_back(), *TaskEntry.objects.filter(status="READY")[:1]][1:],
                within_seconds=120,
                what=lambda: str(list(TaskEntry.objects.filter(status="READY"))[:5]),
            )
    assert set(TaskEntry.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    kinds = ("postponed", "retried", "slow")
    assert effects() == sorted(f"{kind} {number}" for kind in kinds for number in numbers)


def test_an_entry_without_a_message_is_named_and_gets_one_again(databases: None) -> None:
    """One whose message the broker has lost, and one whose message was consumed."""
    lost, consumed, waits = (tasks.note.enqueue(str(number)) for number in range(3))
    queue_messages()
    _lose(lost.id)
    drain()
    TaskEntry.objects.filter(pk=consumed.id).update(status="READY", attempts=0, finished_at=None)
    Effect.objects.all().delete()
    assert stranded_tasks() == {}, "they may be on their way"
    TaskEntry.objects.update(announced_at=long_ago())
    assert stranded_tasks() == {
        lost.id: "the broker does not have the message of the task",
        consumed.id: "the message of the task was consumed, but the task did not run",
    }
    assert stranded.mend() == {"published": 2, "failed": 0}
    assert (stranded.mend(), stranded_tasks()) == ({"published": 0, "failed": 0}, {})
    drain()
    assert effects() == ["0", "1"]
    waits.refresh()
    assert waits.is_finished


def test_an_entry_whose_message_waits_or_is_a_dead_letter_is_not_stranded(databases: None) -> None:
    postponed = tasks.note.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("1")
    queued, dead = tasks.note.enqueue("2"), tasks.note.using(queue_name="mail").enqueue("3")
    queue_messages()
    with broker_connection() as (connection, _):
        connection.execute("SELECT set_config('search_path', 'outbox', false)")
        letter = (
            "INSERT INTO dead_letter (group_id, log_id, attempts, error)"
            " SELECT group_id, log_id, 16, 'killed' FROM commit_log, consumer_group"
            " WHERE commit_log.key = %s AND consumer_group.name = 'tasks.mail'"
        )
        register(Executor(connection, "outbox"), Subscription(topic="tasks", group="tasks.mail"))
        connection.execute(letter, [dead.id])
        TaskEntry.objects.update(announced_at=long_ago())
        assert stranded_tasks() == {}
        connection.execute("UPDATE dead_letter SET replayed_at = now(), discarded_at = now()")
        connection.execute(
            "INSERT INTO consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset)"
            " SELECT group_id, queue_id, 9, 9, 1000, 0 FROM consumer_group, queue WHERE name = 'tasks.mail'"
        )
    assert stranded_tasks() == {dead.id: "the dead letter of the task was discarded"}
    assert stranded.mend() == {"published": 0, "failed": 1}
    dead.refresh()
    assert dead.status == "FAILED"
    assert TaskEntry.objects.filter(pk__in=[postponed.id, queued.id], status="READY").count() == 2


def _lose(task_id: str) -> None:
    """As a restore of the broker's database does."""
    with broker_connection() as (connection, _):
        connection.execute(
            "DELETE FROM outbox.consume_queue USING outbox.commit_log log"
            " WHERE consume_queue.log_id = log.log_id AND log.key = %s",
            [task_id],
        )
        connection.execute("DELETE FROM outbox.commit_log WHERE key = %s", [task_id])


def long_ago() -> datetime:
    return timezone.now() - timedelta(minutes=5)


def stranded_tasks() -> dict[str, str]:
    """The condition's evidence: task and reason."""
    found = [one for one in look().verdict.conditions if one.name == "task_stranded"]
    return {str(fact["task"]): str(fact["why"]) for one in found for fact in one.evidence}


def work(*, faults: str = "") -> int:
    """Drain in a process of its own; its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "django", "outbox_worker", "--drain"],
        env={**environment(outbox={"LEASE_SECONDS": 1}, faults=faults), "DJANGO_SETTINGS_MODULE": SETTINGS},
        cwd=ROOT,
        check=False,
        timeout=120,
    ).returncode


def test_a_task_stores_each_broken_exception() -> None:
    for name, make in FAILURES.items():
        stored = error_of(make())
        assert "\x00" not in stored["traceback"], name
        assert len(stored["traceback"]) < 250_000 and stored["exception_class_path"]
