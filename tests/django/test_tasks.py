"""The backend for Django's tasks, in memory: the promises of the API, as in Django's own suite for backends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.core.checks import CheckMessage
from django.db import transaction
from django.db.models import Model
from django.test.utils import override_settings
from django.utils import timezone

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.testing import InMemoryOutbox, in_memory_outbox
from outbox.contrib.django.worker.drain import drain, queue_messages
from outbox.contrib.tasks import stranded
from outbox.contrib.tasks.api import (
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from outbox.contrib.tasks.models import TaskEntry
from outbox.contrib.tasks.results import error_of, first_and_last
from outbox.contrib.tasks.running import register_backends
from outbox.errors import ConfigurationError
from outbox.retry import MAX_ATTEMPTS
from outbox.subscription import Subscription
from tests.django.configured import TASKS
from tests.django.processes import ROOT, environment, process
from tests.django.sessions import broker_connection
from tests.django.shop import tasks
from tests.django.shop.models import Effect
from tests.django.state import effects, rolled_back
from tests.hostile import FAILURES
from tests.support import eventually

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks.exceptions import InvalidTask, TaskResultMismatch
else:
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultMismatch


@pytest.fixture(autouse=True)
def no_tasks(application: None, no_subscribers: None) -> Iterator[None]:
    register_backends()
    yield
    TaskEntry.objects.all().delete()


@pytest.fixture
def outbox() -> Iterator[InMemoryOutbox]:
    with in_memory_outbox() as outbox:
        yield outbox


@contextmanager
def options(**changed: Any) -> Iterator[None]:
    default = {**TASKS["default"], **changed}
    with override_settings(TASKS={"default": default}):
        register_backends()
        yield


def test_a_task_runs_if_and_only_if_its_transaction_commits(outbox: InMemoryOutbox) -> None:
    with rolled_back():
        tasks.note.enqueue("undone")
    with transaction.atomic():
        kept = tasks.note.enqueue("kept")
        assert outbox.drain() == 0
    assert outbox.drain() == 1
    assert effects() == ["kept"]
    assert [str(entry.pk) for entry in TaskEntry.objects.all()] == [kept.id]


def test_a_result_is_ready_and_then_successful(outbox: InMemoryOutbox) -> None:
    result = tasks.note.enqueue("1")
    assert (result.status, result.attempts, result.args, result.kwargs) == (TaskResultStatus.READY, 0, ["1"], {})
    assert result.enqueued_at is not None
    assert result.started_at is None
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    outbox.drain()
    result.refresh()
    assert (result.status, result.return_value, result.errors) == (TaskResultStatus.SUCCESSFUL, "noted 1", [])
    assert result.is_finished
    assert result.attempts == 1
    assert result.started_at is not None
    assert result.finished_at is not None
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert tasks.note.get_result(result.id) == result


def test_a_failure_is_kept_and_its_effects_are_not(outbox: InMemoryOutbox) -> None:
    failing: dict[Any, type] = {tasks.fail: LookupError, tasks.leave: SystemExit, tasks.strange: TypeError}
    for task, kind in failing.items():
        result = task.enqueue("1")
        assert outbox.drain() == 1
        result.refresh()
        assert result.status == TaskResultStatus.FAILED
        assert [error.exception_class for error in result.errors] == [kind]
        assert f"{kind.__name__}" in result.errors[0].traceback
        with pytest.raises(ValueError, match="failed"):
            _ = result.return_value
        assert effects() == []
        assert outbox.drain() == 0


def test_coroutines(outbox: InMemoryOutbox) -> None:
    async def call() -> Any:
        result = await tasks.note_async.aenqueue(number="1")
        await result.arefresh()
        return await tasks.note_async.aget_result(result.id)

    result = async_to_sync(call)()
    assert result.kwargs == {"number": "1"}
    outbox.drain()
    async_to_sync(result.arefresh)()
    assert result.return_value == ["1", {"async": True}]
    assert effects() == ["1"]


def test_a_priority_is_refused() -> None:
    with pytest.raises(InvalidTask, match="priority"):
        tasks.note.using(priority=7)


def test_a_task_waits_until_it_may_run(outbox: InMemoryOutbox) -> None:
    soon = timezone.now() + timedelta(minutes=1)
    result = tasks.note.using(run_after=soon).enqueue("later")
    tasks.note.using(run_after=timezone.now() - timedelta(minutes=1)).enqueue("past")
    tasks.note.enqueue("now")
    assert outbox.drain() == 2
    assert effects() == ["now", "past"]
    outbox.broker.advance(61)
    assert outbox.drain() == 1
    result.refresh()
    assert result.is_finished
    assert result.task.run_after == soon


def test_queues_have_groups_of_their_own() -> None:
    with in_memory_outbox(groups=["tasks.mail"]) as outbox:
        tasks.note.enqueue("default")
        tasks.mail.enqueue("mail")
        assert outbox.drain() == 1
    assert effects() == ["mail"]
    with pytest.raises(InvalidTask, match="nowhere"):
        tasks.note.using(queue_name="nowhere")


def test_any_queue(outbox: InMemoryOutbox) -> None:
    with options(QUEUES=[]):
        assert task_backends["default"].groups == {"tasks": ""}  # type: ignore[attr-defined]
        outbox.reset()
        tasks.note.using(queue_name="anywhere").enqueue("1")
        assert outbox.drain() == 1
    assert effects() == ["1"]


def test_another_attempt(outbox: InMemoryOutbox) -> None:
    with options(OPTIONS={"max_attempts": 2, "delays_seconds": [30]}):
        outbox.reset()
        result, failing = tasks.fail_first.enqueue("1"), tasks.fail.enqueue("2")
        assert outbox.drain() == 2
        result.refresh()
        assert (result.status, result.attempts, len(result.errors)) == (TaskResultStatus.READY, 1, 1)
        outbox.broker.advance(31)
        assert outbox.drain() == 2
        result.refresh()
        failing.refresh()
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 2)
    assert (failing.status, len(failing.errors)) == (TaskResultStatus.FAILED, 2)
    assert effects() == ["1"]


def test_a_task_with_many_attempts_keeps_its_first_and_last_errors(outbox: InMemoryOutbox) -> None:
    """Each attempt writes the whole row again, so it must not grow. The number of attempts stays right up to 30,000."""
    with options(OPTIONS={"max_attempts": 15, "delays_seconds": [0]}):
        outbox.reset()
        result = tasks.fail.enqueue("1")
        assert outbox.drain() == 15
        result.refresh()
        assert (result.status, result.attempts, len(result.errors)) == (TaskResultStatus.FAILED, 15, 10)
        [entry] = TaskEntry.objects.all()
        assert (entry.attempts, len(entry.worker_ids), len(entry.errors)) == (15, 10, 10)
        TaskEntry.objects.update(attempts=40_000)
        result.refresh()
        assert result.attempts == MAX_ATTEMPTS
    assert first_and_last(list(range(12))) == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("argument", [object(), float("nan"), "\0", "\ud800", {1, 2}])
def test_what_cannot_be_stored_is_refused(outbox: InMemoryOutbox, argument: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        tasks.note.enqueue(argument)  # type: ignore[arg-type]
    assert not TaskEntry.objects.exists()
    tasks.note.enqueue(number="a literal \\u0000")
    outbox.drain()
    assert effects() == ["a literal \\u0000"]


def test_unknown_results() -> None:
    for unknown in ("", "abc", "0190a0a0-0000-7000-8000-000000000000"):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.note.get_result(unknown)
    with in_memory_outbox():
        result = tasks.note.enqueue("1")
    with pytest.raises(TaskResultMismatch):
        tasks.mail.get_result(result.id)


def test_signals(outbox: InMemoryOutbox) -> None:
    seen: list[tuple[str, str]] = []
    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = {}
    for name, one in signals.items():
        receivers[name] = _noting(seen, name)
        one.connect(receivers[name])
    try:
        tasks.note.enqueue("1")
        tasks.fail.enqueue("2")
        outbox.drain()
    finally:
        for name, one in signals.items():
            one.disconnect(receivers[name])
    assert seen[:2] == [("enqueued", "READY")] * 2
    assert sorted(seen[2:]) == [("finished", "FAILED"), ("finished", "SUCCESSFUL"), *[("started", "RUNNING")] * 2]


def _noting(seen: list[tuple[str, str]], name: str) -> Callable[..., None]:
    def receive(sender: Any, task_result: Any, **kwargs: Any) -> None:
        seen.append((name, str(task_result.status)))

    return receive


def test_a_message_whose_entry_is_gone_is_done(outbox: InMemoryOutbox) -> None:
    tasks.note.enqueue("1")
    TaskEntry.objects.all().delete()
    assert outbox.drain() == 1
    assert outbox.broker.dead_letters == []


def test_a_task_that_this_code_does_not_have_is_tried_by_later_code_and_fails_in_the_end(
    outbox: InMemoryOutbox,
) -> None:
    tasks.note.enqueue("1")
    tasks.note.enqueue("2")
    TaskEntry.objects.update(task_path="tests.django.shop.tasks.not_yet")
    assert outbox.drain() == 2
    assert {(entry.status, len(entry.errors)) for entry in TaskEntry.objects.all()} == {("READY", 1)}
    TaskEntry.objects.filter(args=["1"]).update(task_path=tasks.note.module_path)
    for _ in range(16):
        outbox.broker.advance(7300)
        outbox.drain()
    assert dict(TaskEntry.objects.values_list("args__0", "status")) == {"1": "SUCCESSFUL", "2": "FAILED"}
    assert "tests.django.shop.tasks.not_yet" in TaskEntry.objects.get(args=["2"]).errors[0]["traceback"]


def found(**changed: Any) -> list[str | None]:
    with override_settings(TASKS={"default": {**TASKS["default"], **changed}}):
        messages: list[CheckMessage] = list(task_backends["default"].check())
        return [message.id for message in messages]


def test_checks(outbox_settings: Callable[..., None]) -> None:
    assert found() == []
    assert found(OPTIONS={"topic": "nowhere"}) == ["outbox_tasks.E002"]
    assert found(OPTIONS={"topic": "orders"}) == ["outbox_tasks.E002"]
    with pytest.raises(ConfigurationError, match="max_attempts"):
        found(OPTIONS={"max_attempt": 2})
    with pytest.raises(ConfigurationError, match=r"\['max_attempts'\] must be a whole number of attempts.* is 0"):
        found(OPTIONS={"max_attempts": 0})
    for wrong, complaint in (
        ({"max_attempts": 30_001}, r"\['max_attempts'\].* at most 30,000"),
        ({"timeout_seconds": 2_073_601}, r"\['timeout_seconds'\].* at most 2,073,600"),
        ({"delays_seconds": [1, 31_622_401]}, r"\['delays_seconds'\]\[1\].* at most 31,622,400"),
        ({"threads": 10_001}, r"\['threads'\].* at most 10,000"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            found(OPTIONS=wrong)
    with pytest.raises(ConfigurationError, match="with space"):
        found(QUEUES=["with space"])
    with override_settings(TASKS={"default": TASKS["default"], "second": TASKS["default"]}):
        assert [item.id for item in task_backends["second"].check()] == ["outbox_tasks.E003"]
    with override_settings(INSTALLED_APPS=["outbox.contrib.django", "tests.django.shop"]):
        assert found() == ["outbox_tasks.E001"]


# -- on a real broker: both paths, threads, a worker that is killed ---------------------------------


SETTINGS = "tests.django.task_settings"


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
