"""Signals: which process sends them, and that no receiver hurts a worker."""

from __future__ import annotations

import json
import signal as unix
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.dispatch import Signal

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.operations.dead_letters import list_dead_letters
from outbox.contrib.django import publish, signals, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.operations import signals as sending
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.processes import child
from tests.django.support import sequence
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


@contextmanager
def received(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """The arguments of each signal that is sent within the block."""
    found: list[dict[str, Any]] = []

    def receive(**arguments: Any) -> None:
        found.append({**arguments, "thread": threading.current_thread().name})

    signal.connect(receive)
    yield found
    signal.disconnect(receive)


def dead_letters() -> list[str]:
    with broker_connection() as (connection, schema):
        return [letter.key for letter in list_dead_letters(Executor(connection, schema))]


def subscribe() -> None:
    @subscriber("orders", group="refusing")
    def refuse(given: Delivery) -> None:
        if given.key == "bad":
            raise PermanentError("no account")


def test_a_dead_letter_is_signalled_once_after_it_is_stored() -> None:
    subscribe()
    with received(signals.message_dead_lettered) as found:
        publish("orders", {}, key="good", at_once=True)
        receipt = publish("orders", {}, key="bad", at_once=True)
        sequence()
        consumer_runtime().run_once()
        assert sending.flush(10)
        [one] = found
        assert one["sender"] is None and one["thread"] == "outbox-signals"
        assert (one["group"], one["topic"], one["key"], one["attempts"]) == ("refusing", "orders", "bad", 1)
        assert one["message_id"] == receipt.message_id
        assert one["error"].startswith("PermanentError: no account")
        assert dead_letters() == ["bad"]
        consumer_runtime().run_once()
        assert sending.flush(10) and len(found) == 1


def test_the_in_memory_broker_signals_on_the_calling_thread(outbox_settings: Callable[..., None]) -> None:
    subscribe()
    with received(signals.message_dead_lettered) as found, in_memory_outbox() as outbox:
        publish("orders", {}, key="bad", at_once=True)
        outbox.drain(raise_errors=False)
        [one] = found
        assert (one["key"], one["thread"]) == ("bad", threading.current_thread().name)


def test_a_process_without_receivers_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = sending._SendingThread()
    monkeypatch.setattr(sending, "_thread", fresh)
    with sending.working(["consumer"]):
        pass
    assert fresh._thread is None


def test_receivers_that_are_too_slow_lose_signals_and_delay_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sending, "_thread", sending._SendingThread())
    began, go_on, seen = threading.Event(), threading.Event(), []

    def slow(**arguments: Any) -> None:
        began.set()
        go_on.wait(60)
        seen.append(arguments["roles"])

    signals.worker_started.connect(slow)
    try:
        sending.send("worker_started", roles=0)
        assert began.wait(10)
        for number in range(sending.MOST_WAITING + 5):
            sending.send("worker_started", roles=number + 1)
        assert not sending.flush(0)
        assert sum("is lost" in one.getMessage() for one in caplog.records) == 5
        go_on.set()
        assert sending.flush(30)
        assert seen == list(range(sending.MOST_WAITING + 1))
    finally:
        go_on.set()
        signals.worker_started.disconnect(slow)


def test_the_error_of_a_worker_is_in_its_last_signal() -> None:
    with received(signals.worker_stopped) as found:
        with pytest.raises(LookupError), sending.working(["consumer"]):
            raise LookupError("gone")
        assert sending.flush(10)
        assert found[0]["roles"] == ("consumer",) and isinstance(found[0]["error"], LookupError)


@pytest.mark.parametrize(
    "hanging", [pytest.param(False, id="raising"), pytest.param(True, id="hanging", marks=pytest.mark.slow)]
)
def test_processes_signal_and_a_broken_receiver_hurts_no_worker(tmp_path: Path, hanging: bool) -> None:
    file = tmp_path / "signals"
    variables = {"TEST_APPS": "tests.django.receivers", "TEST_SIGNALS": str(file)}
    if hanging:
        variables["TEST_HANGING"] = "1"

    def said(name: str) -> list[dict[str, Any]]:
        lines = file.read_text().splitlines() if file.exists() else []
        return [one for one in map(json.loads, lines) if one["signal"] == name]

    with child("broker", variables=variables) as broker, child("consumer", variables=variables) as consumer:
        eventually(lambda: len(said("worker_started")) == 2, within_seconds=30, what="both processes say so")
        publish("payments", {}, key="first", at_once=True)
        eventually(lambda: said("message_dead_lettered"), within_seconds=30, what="the first dead letter")
        publish("payments", {}, key="second", at_once=True)
        eventually(lambda: len(dead_letters()) == 2, within_seconds=30, what="the worker goes on")
        for process in (consumer, broker):
            process.send_signal(unix.SIGTERM)
            _, log = process.communicate(timeout=20)
            assert process.returncode == 0, log
        assert ("LookupError" in log) and "this receiver is broken" in log
    assert {(one["roles"], int(one["pid"])) for one in said("worker_started")} == {
        ("('broker',)", broker.pid),
        ("('consumer',)", consumer.pid),
    }
    assert {one["thread"] for one in said("message_dead_lettered")} == {"outbox-signals"}
    if hanging:
        # The signals after the receiver that hangs are lost with the process, and the process has ended nevertheless.
        assert [one["roles"] for one in said("worker_stopped")] == ["('broker',)"]
        assert len(said("message_dead_lettered")) == 1
    else:
        assert sorted(one["roles"] for one in said("worker_stopped")) == ["('broker',)", "('consumer',)"]
        assert {one["error"] for one in said("worker_stopped")} == {"None"}
        assert [one["key"] for one in said("message_dead_lettered")] == ["first", "second"]
