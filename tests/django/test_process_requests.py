"""An operator ends processes by the page or a command: real workers, from the request to the exit code."""

from __future__ import annotations

import json
import signal
from io import StringIO
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.models import OperatorAction
from tests.django.processes import process
from tests.django.shop.models import Effect, Order
from tests.django.test_worker import _alive, _children
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases")

WORKER = ("-m", "django", "outbox_worker")
QUICK = {"LEASE_SECONDS": 1.5}


def processes() -> list[dict[str, Any]]:
    out = StringIO()
    call_command("outbox_process", "list", "--json", stdout=out)
    found: list[dict[str, Any]] = json.loads(out.getvalue())
    return found


def ask(request: str, process_id: str) -> str:
    out = StringIO()
    call_command("outbox_process", request, process_id, "--no-input", "--reason", "a test", stdout=out)
    return out.getvalue()


def handled(number: str) -> bool:
    return Effect.objects.filter(number=number).exists()


def place(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {"number": number}, key=number)


@pytest.mark.slow
def test_a_drained_process_stays_away_until_its_worker_starts_again() -> None:
    with process(WORKER, outbox=QUICK) as worker:
        place("one")
        eventually(lambda: handled("one"), within_seconds=30, what="the first effect")
        [found] = processes()
        assert found["state"] == "alive" and found["asked"] is None
        assert "Done." in ask("drain", found["process"])
        eventually(lambda: processes() == [], within_seconds=20, what="the end of the process")
        eventually(lambda: len(_children(worker.pid)) == 1, within_seconds=20, what="only the broker process")
        assert worker.poll() is None
        with pytest.raises(CommandError, match="it has ended and released its queues, so there is nothing to end"):
            ask("drain", found["process"])
        place("two")
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=30)
        assert worker.returncode == 0, log
        assert "consumer-1 was drained by an operator" in log and "restart in" not in log
    assert not handled("two")
    with process(WORKER, outbox=QUICK, quiet=True):
        eventually(lambda: handled("two"), within_seconds=30, what="the second effect")
    entry = OperatorAction.objects.get()
    assert (entry.action, entry.outcome, entry.why, entry.after) == (
        "drain_process", "done", "a test", {"asked": "drain"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_call_that_does_not_end_is_cut_off_and_its_message_is_delivered_again() -> None:
    with psycopg.connect(alias_conninfo("default")) as holder:
        holder.execute("LOCK TABLE shop_effect IN EXCLUSIVE MODE")
        with process(WORKER, outbox=QUICK | {"DRAIN_SECONDS": 1}) as worker:
            place("one")
            [found] = eventually(
                lambda: [one for one in processes() if one["calls"]], within_seconds=30, what="a call that waits"
            )
            ask("drain", found["process"])
            eventually(lambda: len(_children(worker.pid)) == 1, within_seconds=20, what="the end of the process")
            worker.send_signal(signal.SIGTERM)
            _, log = worker.communicate(timeout=30)
            assert worker.returncode == 0 and "consumer-1 was drained by an operator" in log, log
        holder.rollback()
    assert not handled("one")
    with process(WORKER, outbox=QUICK, quiet=True):
        eventually(lambda: handled("one"), within_seconds=30, what="the effect")
    assert Effect.objects.filter(number="one").count() == 1


@pytest.mark.slow
def test_a_worker_that_is_asked_to_stop_ends_with_all_of_its_processes() -> None:
    with process(WORKER, outbox=QUICK) as worker:
        [found] = eventually(processes, within_seconds=30, what="a consumer process")
        children = _children(worker.pid)
        assert len(children) == 2
        ask("stop", found["process"])
        _, log = worker.communicate(timeout=30)
        assert worker.returncode == 0, log
        assert "asked to stop the worker of child consumer-1" in log
    eventually(lambda: not any(_alive(pid) for pid in children), within_seconds=10)
    assert processes() == []


@pytest.mark.parametrize("request_", ["drain", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_process_without_a_supervisor_ends(request_: str) -> None:
    with process([*WORKER, "--role", "consumer"], outbox=QUICK) as worker:
        [found] = eventually(processes, within_seconds=30, what="a consumer process")
        ask(request_, found["process"])
        _, log = worker.communicate(timeout=30)
        assert worker.returncode == 0, log


def test_an_unknown_process_is_refused_with_the_reason() -> None:
    with pytest.raises(CommandError, match="`outbox_process list` shows the processes"):
        ask("stop", str(uuid4()))
    assert not OperatorAction.objects.exists()
