"""Real processes: the broker and consumers, from publish to effect."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from django.db import transaction

from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import Condition
from outbox.broker.operations.dead_letters import DeadLetter, list_dead_letters
from outbox.contrib.django import publish
from outbox.contrib.django.operations.watching import look
from tests.django.processes import ROOT, environment, process
from tests.django.sessions import broker_connection
from tests.django.shop.models import Order
from tests.django.state import decisions, effects
from tests.django.support import end_messages_lost
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases")


def place(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {"number": number}, key=number)


def test_a_worker_without_celery_supervises_drains_and_leaves_nothing_behind() -> None:
    with process(["-m", "django", "outbox_worker"]) as worker:
        place("one")
        eventually(lambda: effects() == ["one", "step-one"], within_seconds=60)
        children = _children(worker.pid)
        assert len(children) == 2
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=60)
        assert worker.returncode == 0, log
    eventually(lambda: not any(_alive(pid) for pid in children), within_seconds=10)


@pytest.mark.slow
def test_a_message_that_kills_its_process_is_named_and_given_up() -> None:
    named: list[Condition] = []

    def is_given_up() -> bool:
        named.extend(look().verdict.conditions)
        return any(letter.key == "kills-two" for letter in dead())

    def dead() -> Sequence[DeadLetter]:
        with broker_connection() as (connection, schema):
            return list_dead_letters(Executor(connection, schema))

    with process(["-m", "django", "outbox_worker"], quiet=True) as worker:
        for number in ["one", "kills-two", "three"]:
            place(number)
        eventually(is_given_up, within_seconds=90)
        eventually(lambda: effects() == sorted(["one", "step-one", "three", "step-three"]), within_seconds=60)
        assert worker.poll() is None
    assert "kills-two" in {fact["key"] for one in named if one.name == "quarantined" for fact in one.evidence}
    # Once among others and three times alone: a crash loop, for as long as that is recent.
    [loop] = [one for one in look().verdict.conditions if one.name == "crash_loop"]
    assert [(str(fact["process"]).split()[0], fact["deaths"]) for fact in loop.evidence] == [("consumer-1", 4)]
    (letter,) = dead()
    assert letter.key == "kills-two" and letter.error.startswith("KillsItsProcess: ")


def test_check_role_settles_what_a_lost_end_left_open() -> None:
    with end_messages_lost():
        place("lost-end")
    assert decisions() == {"lost-end": None}
    with process(["-m", "django", "outbox_worker", "--role", "check"]):
        # Two processes start, one after the other.
        eventually(lambda: decisions() == {"lost-end": "C"}, within_seconds=60)


def test_a_child_that_cannot_work_logs_the_reason_and_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outbox.contrib.django.worker.child", "consumer"],
        env=environment(outbox={"SCHEMA": "not_installed"}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "migrate" in done.stderr


def _children(pid: int) -> list[int]:
    """The supervisor's threads start the children, so every thread's are its own."""
    tasks = Path(f"/proc/{pid}/task")
    return sorted(int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split())


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
