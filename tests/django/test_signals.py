"""Signals: which process sends them, and that no receiver hurts a worker."""

from __future__ import annotations

import json
import logging
import re
import signal as unix
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core import mail
from django.db import connections
from django.dispatch import Signal
from django.test.utils import override_settings
from django.utils import timezone

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.operations.dead_letters import list_dead_letters
from outbox.contrib.django import publish, signals, subscriber
from outbox.contrib.django.models import RaisedCondition
from outbox.contrib.django.operations import raised
from outbox.contrib.django.operations import signals as sending
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.conftest import point_alias
from tests.django.given_conditions import give
from tests.django.processes import child
from tests.django.sessions import broker_connection
from tests.django.support import consume
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
        consume()
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


def test_a_signal_without_a_thread_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would end the dispatching thread, which tells of a dead letter."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sending, "_thread", sending._SendingThread())
    with received(signals.worker_started) as found:
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", refuse)
            sending.send("worker_started", roles=1)
        assert "can't start new thread" in caplog.text
        sending.send("worker_started", roles=2)
        assert sending.flush(10)
    assert [one["roles"] for one in found] == [1, 2]


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


# -- changes of conditions --------------------------------------------------------------------------


PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "monitoring.md"


@pytest.fixture
def _only_rules_of_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    give(monkeypatch)
    yield
    for alias in ("default", "lite"):
        RaisedCondition.objects.using(alias).all().delete()


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> list[Condition]:
    """The conditions that hold in the application; the broker's own conditions do not count in these tests."""
    found: list[Condition] = []
    give(monkeypatch, saga_stalled=lambda: found)
    return found


def stalled(*sagas: str, severity: Severity = Severity.WARNING) -> Condition:
    return Condition("saga_stalled", severity, [{"saga": saga, "since_seconds": 9} for saga in sagas], len(sagas))


def now_and(seconds: float) -> datetime:
    return timezone.now() + timedelta(seconds=seconds)


@contextmanager
def changes(name: str = "saga_stalled") -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Return a function that returns subject and severity of each signal about this condition within the block."""
    with received(signals.condition_changed) as found:

        def sent() -> list[tuple[str, str]]:
            assert sending.flush(10)
            return [(one["subject"], one["severity"]) for one in found if one["name"] == name]

        yield sent


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_a_change_is_reported_once_by_several_processes(
    holds: list[Condition], caplog: pytest.LogCaptureFixture
) -> None:
    together = threading.Barrier(4)

    def one_process(second: float) -> None:
        together.wait(30)
        try:
            raised.run_once(now_and(second))
        finally:
            connections.close_all()

    def all_processes(second: float) -> None:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(one_process, second) for _ in range(4)]:
                future.result()
        raised.run_once(now_and(second))

    caplog.set_level(logging.INFO, logger=raised.__name__)
    with changes() as sent:
        holds.append(stalled("a", "b"))
        all_processes(0)
        assert sorted(sent()) == [("saga a", "warning"), ("saga b", "warning")]
        holds[:] = [stalled("a", "b", severity=Severity.CRITICAL)]
        all_processes(1)
        assert sorted(sent()[2:]) == [("saga a", "critical"), ("saga b", "critical")]
        holds.clear()
        all_processes(500)
        assert sorted(sent()[4:]) == [("saga a", "ok"), ("saga b", "ok")]
    records = [(one.levelname, one.getMessage()) for one in caplog.records if "stalled (saga a)" in one.getMessage()]
    assert [level for level, _ in records] == ["WARNING", "ERROR", "INFO"]
    assert records[0][1] == (
        f"condition saga_stalled (saga a): {stalled('a').text} What to do: {stalled('a').next_step}"
    )
    assert records[2][1].startswith("condition saga_stalled (saga a) is over; it held since ")


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_a_signal_has_text_next_step_and_beginning(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    with received(signals.condition_changed) as found:
        raised.run_once(began := now_and(0))
        holds.clear()
        raised.run_once(now_and(500))
        assert sending.flush(10)
    first, last = [one for one in found if one["name"] == "saga_stalled"]
    assert (first["text"], first["next_step"]) == (stalled("a").text, stalled("a").next_step)
    assert (last["text"], last["next_step"]) == ("", "")
    assert first["since"] == last["since"] == began


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_a_condition_is_over_when_it_was_away_long_enough(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    raised.run_once(now_and(0))
    holds.clear()
    with changes() as sent:
        raised.run_once(now_and(raised.CLEAR_SECONDS - 30))
        holds.append(stalled("a"))
        raised.run_once(now_and(raised.CLEAR_SECONDS))
        holds.clear()
        raised.run_once(now_and(2 * raised.CLEAR_SECONDS - 10))
        assert sent() == []
        raised.run_once(now_and(3 * raised.CLEAR_SECONDS))
        raised.run_once(now_and(4 * raised.CLEAR_SECONDS))
        assert sent() == [("saga a", "ok")]


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_each_severity_is_reported_and_a_condition_that_is_cut_is_not_over(holds: list[Condition]) -> None:
    with changes() as sent:
        for second, severity in enumerate((Severity.WARNING, Severity.CRITICAL, Severity.CRITICAL, Severity.WARNING)):
            holds[:] = [stalled("a", severity=severity)]
            raised.run_once(now_and(second))
        # The list of facts ends before "saga a", which may still be stalled.
        holds[:] = [Condition("saga_stalled", Severity.WARNING, [{"saga": "b"}], 50)]
        raised.run_once(now_and(500))
        assert sent() == [(f"saga {one}", severity) for one, severity in zip(
            "aaab", ("warning", "critical", "warning", "warning"), strict=True
        )]  # fmt: skip


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_a_broker_that_is_away_is_reported_and_ends_nothing(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    with changes() as of_saga, changes("unreachable") as of_broker:
        raised.run_once(now_and(0))
        point_alias("broker", "postgresql://nobody@127.0.0.1:1/nowhere")
        raised.run_once(now_and(300))
        assert [severity for _, severity in of_broker()] == ["critical"]
        assert of_saga() == [("saga a", "warning")]


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_the_receiver_of_the_page_mails_what_is_critical_and_its_end(holds: list[Condition]) -> None:
    [block] = re.findall(r"```python\n(# shop/alarms\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "shop.alarms"}
    exec(block, namespace)
    receiver = namespace["mail_operators"]
    mail.outbox = []
    locmem = "django.core.mail.backends.locmem.EmailBackend"
    try:
        with override_settings(EMAIL_BACKEND=locmem, ADMINS=[("Operators", "ops@example.org")]):
            for second, severity in enumerate((Severity.WARNING, Severity.CRITICAL, None)):
                holds[:] = [stalled("a", severity=severity)] if severity else []
                raised.run_once(now_and(300 * second))
                assert sending.flush(10)
    finally:
        signals.condition_changed.disconnect(receiver)
    ours = [one for one in mail.outbox if "saga_stalled" in one.subject]
    prefix = django_settings.EMAIL_SUBJECT_PREFIX
    assert [one.subject.removeprefix(prefix) for one in ours] == [
        "outbox: saga_stalled (saga a) is critical",
        "outbox: saga_stalled (saga a) is over",
    ]
    assert stalled("a").next_step in ours[0].body


@pytest.mark.usefixtures("_only_rules_of_the_test")
def test_it_works_with_sqlite_as_application_database(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    with override_settings(DATABASE_ROUTERS=["tests.django.test_signals.Lite"]):
        raised.run_once(now_and(0))
        assert RaisedCondition.objects.using("lite").filter(subject="saga a").count() == 1
        holds.clear()
        raised.run_once(now_and(300))
        assert RaisedCondition.objects.using("lite").filter(subject="saga a").count() == 0


class Lite:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "lite"
