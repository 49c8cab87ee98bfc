"""Each change of a condition is a signal and a log record, once for all processes of the service."""

from __future__ import annotations

import logging
import re
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
from django.test.utils import override_settings
from django.utils import timezone

from outbox.broker.operations.conditions import Condition, Severity
from outbox.contrib.django import signals
from outbox.contrib.django.models import RaisedCondition
from outbox.contrib.django.operations import raised
from outbox.contrib.django.operations import signals as sending
from tests.django.conftest import point_alias
from tests.django.given_conditions import give
from tests.django.test_signals import received

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "monitoring.md"


@pytest.fixture(autouse=True)
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


def test_a_broker_that_is_away_is_reported_and_ends_nothing(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    with changes() as of_saga, changes("unreachable") as of_broker:
        raised.run_once(now_and(0))
        point_alias("broker", "postgresql://nobody@127.0.0.1:1/nowhere")
        raised.run_once(now_and(300))
        assert [severity for _, severity in of_broker()] == ["critical"]
        assert of_saga() == [("saga a", "warning")]


def test_a_receiver_that_raises_stops_neither_the_pass_nor_other_receivers(
    holds: list[Condition], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**arguments: Any) -> None:
        raise LookupError("this receiver is broken")

    signals.condition_changed.connect(broken)
    try:
        with changes() as sent:
            holds.append(stalled("a"))
            assert raised.run_once(now_and(0))["changes"] >= 1
            holds.append(stalled("b"))
            raised.run_once(now_and(1))
            assert sent() == [("saga a", "warning"), ("saga b", "warning")]
    finally:
        signals.condition_changed.disconnect(broken)
    assert "this receiver is broken" in caplog.text


def test_the_receiver_of_the_page_mails_what_is_critical_and_its_end(holds: list[Condition]) -> None:
    [block] = re.findall(r"```python\n(# shop/alarms\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {}
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


def test_it_works_with_sqlite_as_application_database(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    with override_settings(DATABASE_ROUTERS=["tests.django.test_condition_changes.Lite"]):
        raised.run_once(now_and(0))
        assert RaisedCondition.objects.using("lite").filter(subject="saga a").count() == 1
        holds.clear()
        raised.run_once(now_and(300))
        assert RaisedCondition.objects.using("lite").filter(subject="saga a").count() == 0


class Lite:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "lite"
