"""Conditions are reported once by all processes, and a notification is sent until its receiver confirms it."""

from __future__ import annotations

import json
import signal as unix
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from typing import Any

import pytest
from django.core import mail
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import override_settings
from django.utils import timezone

from outbox import Delivery
from outbox.broker.operations.conditions import Condition, Severity
from outbox.contrib.django import publish, signals, subscriber
from outbox.contrib.django.models import Notification, RaisedCondition
from outbox.contrib.django.operations import additions, notifications, raised
from outbox.contrib.django.operations import signals as sending
from outbox.contrib.django.settings.conf import parse_settings
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.contrib.sinks.signatures import verify
from outbox.errors import ConfigurationError, PermanentError
from tests.django.conftest import point_alias
from tests.django.processes import process
from tests.django.support import sequence
from tests.django.test_settling_commands import undecided
from tests.django.test_signals import received
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

SECRET = "whsec_" + "QUFB" * 11
MAILBOX = {"mail": ["ops@example.org"], "page_url": "https://shop.example.org/outbox/"}


@pytest.fixture(autouse=True)
def _mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mails are kept in memory; passes deliver nothing by themselves; only the rules of the test hold."""
    monkeypatch.setattr(notifications, "deliver_soon", lambda: None)
    monkeypatch.setattr(additions, "rules", {})
    mail.outbox = []
    with override_settings(EMAIL_BACKEND="django.core.mail.backends.locmem.EmailBackend"):
        yield
    for alias in ("default", "lite"):
        for model in (RaisedCondition, Notification):
            model.objects.using(alias).all().delete()


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> list[Condition]:
    """The conditions that hold in the application; the broker's own conditions do not count in these tests."""
    found: list[Condition] = []
    additions.add_rule("saga_stalled", lambda run: list(found))
    return found


def stalled(*sagas: str, severity: Severity = Severity.WARNING) -> Condition:
    return Condition("saga_stalled", severity, [{"saga": saga, "since_seconds": 9} for saga in sagas], len(sagas))


def now_and(seconds: float) -> datetime:
    return timezone.now() + timedelta(seconds=seconds)


def reports(name: str = "saga_stalled") -> list[tuple[str, list[str]]]:
    found = Notification.objects.order_by("created_at")
    return [(one.content["event"], one.content["facts"]) for one in found if one.content["name"] == name]


def test_an_edge_is_reported_once_by_several_processes(
    holds: list[Condition], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY=MAILBOX)
    holds.append(stalled("a", "b"))
    together = threading.Barrier(4)

    def one_process() -> None:
        together.wait(30)
        try:
            raised.run_once()
        finally:
            connections.close_all()

    with received(signals.condition_raised) as found, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(one_process) for _ in range(4)]:
            future.result()
        raised.run_once()
        assert sending.flush(10)
    ours = [(one["name"], one["subject"], one["severity"]) for one in found if one["name"] == "saga_stalled"]
    assert sorted(ours) == [("saga_stalled", "saga a", "warning"), ("saga_stalled", "saga b", "warning")]
    assert sorted(fact for event, facts in reports() for fact in facts) == ["saga a", "saga b"]


def test_a_condition_is_cleared_when_it_was_away_long_enough(
    holds: list[Condition], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY=MAILBOX)
    holds.append(stalled("a"))
    raised.run_once(now_and(0))
    holds.clear()
    with received(signals.condition_cleared) as found:
        raised.run_once(now_and(raised.CLEAR_SECONDS - 30))
        holds.append(stalled("a"))
        raised.run_once(now_and(raised.CLEAR_SECONDS))
        holds.clear()
        raised.run_once(now_and(2 * raised.CLEAR_SECONDS - 10))
        assert sending.flush(10) and [one for one in found if one["name"] == "saga_stalled"] == []
        raised.run_once(now_and(3 * raised.CLEAR_SECONDS))
        raised.run_once(now_and(4 * raised.CLEAR_SECONDS))
        assert sending.flush(10)
    assert [one["subject"] for one in found if one["name"] == "saga_stalled"] == ["saga a"]
    assert reports() == [("raised", ["saga a"]), ("cleared", ["saga a"])]


def test_a_condition_that_grows_worse_is_reported_again_and_one_that_is_cut_is_not_cleared(
    holds: list[Condition], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY={**MAILBOX, "conditions": "critical"})
    holds.append(stalled("a"))
    raised.run_once(now_and(0))
    assert reports() == []
    holds[:] = [stalled("a", severity=Severity.CRITICAL)]
    raised.run_once(now_and(1))
    holds[:] = [stalled("a")]
    raised.run_once(now_and(2))
    assert reports() == [("raised", ["saga a"])]
    # The list of facts ends before "saga a", which may still be stalled.
    holds[:] = [Condition("saga_stalled", Severity.WARNING, [{"saga": "b"}], 50)]
    raised.run_once(now_and(500))
    assert RaisedCondition.objects.filter(subject="saga a").exists()


def test_the_end_of_a_condition_that_was_critical_is_reported(
    holds: list[Condition], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY={**MAILBOX, "conditions": "critical"})
    for second, severity in enumerate((Severity.CRITICAL, Severity.WARNING)):
        holds[:] = [stalled("a", severity=severity)]
        raised.run_once(now_and(second))
    holds.clear()
    raised.run_once(now_and(500))
    assert reports() == [("raised", ["saga a"]), ("cleared", ["saga a"])]


def test_a_broker_that_is_away_is_reported_and_clears_nothing(
    holds: list[Condition], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY={**MAILBOX, "conditions": ["unreachable", "saga_stalled"]})
    holds.append(stalled("a"))
    raised.run_once(now_and(0))
    point_alias("broker", "postgresql://nobody@127.0.0.1:1/nowhere")
    raised.run_once(now_and(300))
    assert [event for event, _ in reports("unreachable")] == ["raised"]
    assert reports() == [("raised", ["saga a"])]


def test_a_parked_transaction_is_signalled_once() -> None:
    first = undecided("a")
    with received(signals.transaction_parked) as found:
        raised.run_once(now_and(0))
        second = undecided("b", "c")
        raised.run_once(now_and(10))
        raised.run_once(now_and(20))
        for one in (first[0], second[0]):
            call_command("outbox_transaction", "decide", str(one), "commit", "--no-input", stdout=StringIO())
        raised.run_once(now_and(300))
        assert sending.flush(10)
    assert [(one["transaction_id"], one["producer_group"]) for one in found] == [
        (one, "shop") for one in (*first, *sorted(second))
    ]
    assert [one["topics"] for one in found] == [["orders"]] * 3
    kept = RaisedCondition.objects.filter(kind=RaisedCondition.Kind.TRANSACTION)
    assert [row.subject for row in kept] == [str(second[1])]


def test_dead_letters_are_folded_by_group_and_error(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(NOTIFY={**MAILBOX, "conditions": ["dead_letters"]})

    @subscriber("orders", group="refusing")
    def refuse(given: Delivery) -> None:
        raise PermanentError("no account") if given.key == "bad" else ZeroDivisionError

    def fail(count: int) -> None:
        for _ in range(count):
            publish("orders", {}, key="bad", at_once=True)
        sequence()
        consumer_runtime().run_once()

    fail(3)
    raised.run_once(now_and(0))
    raised.run_once(now_and(10))
    text = "group refusing: {} dead letters, the newest: PermanentError: no account"
    assert reports("dead_letters") == [("raised", [text.format(3)])]
    fail(2)
    raised.run_once(now_and(20))
    assert len(reports("dead_letters")) == 1, "the next report folds the letters of ten minutes"
    raised.run_once(now_and(raised.REPEAT_SECONDS + 30))
    raised.run_once(now_and(raised.REPEAT_SECONDS + 60))
    assert reports("dead_letters")[1:] == [("raised", [text.format(5)])]
    call_command("outbox_dead_letter", "discard", "refusing", "--all", "--no-input", stdout=StringIO())
    raised.run_once(now_and(raised.REPEAT_SECONDS + 200))
    assert reports("dead_letters")[2:] == [("cleared", ["group refusing, error PermanentError"])]


def test_many_dead_letters_are_critical(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(NOTIFY={**MAILBOX, "conditions": "critical"}, THRESHOLDS={"DEAD_LETTERS": (1, 2)})

    @subscriber("orders", group="refusing")
    def refuse(given: Delivery) -> None:
        raise PermanentError("no account")

    for second, reported in enumerate(([], [("raised", ["group refusing"])])):
        publish("orders", {}, key="bad", at_once=True)
        sequence()
        consumer_runtime().run_once()
        raised.run_once(now_and(second))
        assert reports("dead_letters") == reported
    call_command("outbox_dead_letter", "discard", "refusing", "--all", "--no-input", stdout=StringIO())
    raised.run_once(now_and(500))
    assert reports("dead_letters")[1:] == [("cleared", ["group refusing"])]


# -- sending -----------------------------------------------------------------------------------------------


@dataclass
class Receiver:
    """A web server that answers with `statuses`, then 200. While `may_answer` is not set, it hangs."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def declared(self, **options: Any) -> dict[str, Any]:
        allowed = {"allow_private": True, "allow_http": True}
        return {"webhook": {"url": self.url, "secrets": [SECRET], "options": allowed, **options}}

    @property
    def ids(self) -> list[str]:
        return [verify([SECRET], headers, body, now=time.time()) for headers, body in self.requests]


@contextmanager
def serving() -> Iterator[Receiver]:
    receiver = Receiver()
    receiver.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.requests.append((dict(self.headers), body))
            receiver.may_answer.wait(60)
            try:
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.end_headers()
            except OSError:
                pass  # The client was killed.

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving() as found:
        yield found


def report(facts: Sequence[str] = ("saga a",)) -> notifications.Report:
    return notifications.Report(
        event="raised", name="saga_stalled", severity="warning", meaning="They wait.", next_step="Replay.", facts=facts
    )


def test_a_mail_has_meaning_facts_next_step_and_link(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(NOTIFY=MAILBOX)
    notifications.store([report()], now_and(0))
    [row] = Notification.objects.all()
    assert notifications.deliver_once(now_and(1)) == {"sent": 1, "failed": 0}
    [sent] = mail.outbox
    assert sent.to == ["ops@example.org"] and sent.subject == "outbox: saga_stalled (warning)"
    assert sent.extra_headers["Message-ID"] == f"<{row.id}@outbox>"
    assert sent.body.splitlines() == [
        *("They wait.", "- saga a", "What to do: Replay.", "Service: shop", "https://shop.example.org/outbox/"),
    ]
    assert notifications.deliver_once(now_and(2)) == {"sent": 0, "failed": 0}


def test_a_failing_webhook_is_called_again_later_with_the_same_id(
    receiver: Receiver, outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    outbox_settings(NOTIFY={**MAILBOX, **receiver.declared()})
    receiver.statuses = [500, 503]
    notifications.store([report(), report()], now_and(0))
    assert notifications.deliver_once(now_and(1)) == {"sent": 2, "failed": 1}, "mails go out; one call is enough"
    assert len(receiver.requests) == 1 and "answered 500" in caplog.text
    [failed] = Notification.objects.filter(attempts=1)
    assert "answered 500" in failed.error
    assert notifications.deliver_once(now_and(2))["failed"] == 1, "the other one is not put off by the first"
    assert notifications.deliver_once(now_and(3)) == {"sent": 0, "failed": 0}
    assert notifications.deliver_once(now_and(90)) == {"sent": 2, "failed": 0}
    assert not Notification.objects.exists()
    assert sorted(receiver.ids[:2]) == sorted(receiver.ids[2:])
    body = json.loads(receiver.requests[0][1])
    assert body["name"] == "saga_stalled" and body["facts"] == ["saga a"] and body["service"] == "shop"
    assert body["page_url"] == MAILBOX["page_url"]


def test_slack_gets_text_and_needs_no_secret(receiver: Receiver, outbox_settings: Callable[..., None]) -> None:
    outbox_settings(NOTIFY=receiver.declared(form="slack", secrets=[]))
    notifications.store([report()], now_and(0))
    assert notifications.deliver_once(now_and(1))["sent"] == 1
    body = json.loads(receiver.requests[0][1])
    assert body == {
        "text": "*outbox: saga_stalled (warning)*\nThey wait.\n- saga a\nWhat to do: Replay.\nService: shop"
    }


def test_a_receiver_that_never_confirms_is_given_up(
    receiver: Receiver, outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    outbox_settings(NOTIFY=receiver.declared())
    notifications.store([report()], now_and(0))
    receiver.statuses = [400]
    notifications.deliver_once(now_and(notifications.GIVE_UP_SECONDS + 5))
    assert "is given up after 1 attempts" in caplog.text and not Notification.objects.exists()


def test_one_of_several_processes_sends_a_notification(
    receiver: Receiver, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY=receiver.declared())
    notifications.store([report()] * 5, now_and(0))
    together = threading.Barrier(3)

    def one_process() -> int:
        together.wait(30)
        try:
            return notifications.deliver_once(now_and(1))["sent"]
        finally:
            connections.close_all()

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(lambda _: one_process(), range(3))) == 5
    assert len(set(receiver.ids)) == len(receiver.ids) == 5


def test_a_process_that_is_killed_while_it_sends_loses_nothing(
    receiver: Receiver, outbox_settings: Callable[..., None]
) -> None:
    # The pass of the worker itself reports nothing.
    notify = {**receiver.declared(), "conditions": ["space"]}
    outbox_settings(NOTIFY=notify)
    notifications.store([report()], now_and(0))
    receiver.may_answer.clear()
    with process(["-m", "django", "outbox_worker", "--role", "check"], outbox={"NOTIFY": notify}, quiet=True) as worker:
        eventually(lambda: receiver.requests, within_seconds=60, what="the worker posts")
        worker.send_signal(unix.SIGKILL)
        worker.wait(10)
    receiver.may_answer.set()
    [first] = receiver.ids
    notifications.deliver_once(now_and(1))
    assert len(receiver.requests) == 1, "the killed process may still be sending"
    notifications.deliver_once(now_and(notifications.TAKEN_SECONDS + 60))
    assert receiver.ids == [first, first]


@pytest.mark.slow
def test_a_worker_reports_by_itself_and_a_receiver_that_hangs_delays_no_pass(receiver: Receiver) -> None:
    receiver.may_answer.clear()
    notify = {**receiver.declared(), "conditions": ["no_sequencer"]}
    with process(["-m", "django", "outbox_worker", "--role", "check"], outbox={"NOTIFY": notify}, quiet=True):
        eventually(lambda: receiver.requests, within_seconds=60, what="no_sequencer is posted")
        publish("orders", {}, key="1", at_once=True)
        seen = list(RaisedCondition.objects.values_list("seen_at", flat=True))
        eventually(
            lambda: list(RaisedCondition.objects.values_list("seen_at", flat=True)) != seen,
            within_seconds=60,
            what="the pass goes on",
        )
        receiver.may_answer.set()
        eventually(lambda: not Notification.objects.exists(), within_seconds=60, what="the notification is confirmed")
    assert json.loads(receiver.requests[0][1])["name"] == "no_sequencer"


def test_it_works_with_sqlite_as_application_database(
    holds: list[Condition], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(NOTIFY=MAILBOX)
    holds.append(stalled("a"))
    with override_settings(DATABASE_ROUTERS=["tests.django.test_notifications.Lite"]):
        raised.run_once(now_and(0))
        assert RaisedCondition.objects.using("lite").filter(subject="saga a").count() == 1
        assert notifications.deliver_once(now_and(1))["sent"] >= 1
        holds.clear()
        raised.run_once(now_and(300))
        assert RaisedCondition.objects.using("lite").filter(subject="saga a").count() == 0


class Lite:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "lite"


# -- settings and command ----------------------------------------------------------------------------------


def test_a_test_notification_says_what_each_channel_did(
    receiver: Receiver, outbox_settings: Callable[..., None]
) -> None:
    with pytest.raises(CommandError, match="NOTIFY'\\] is not set"):
        call_command("outbox_doctor", "--notify")
    outbox_settings(NOTIFY={**MAILBOX, **receiver.declared()})
    receiver.statuses = [404]
    shown = StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("outbox_doctor", "--notify", "--json", stdout=shown)
    results = {one["name"]: (one["severity"], one["meaning"]) for one in json.loads(shown.getvalue())}
    assert ended.value.code == 2 and len(mail.outbox) == 1
    assert results["notification by mail"][0] == "ok"
    assert results["notification by webhook"][0] == "critical" and "404" in results["notification by webhook"][1]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({}, "names no channel"),
        ({"mail": "ops@example.org"}, "a list of mail addresses"),
        ({"mial": []}, "Did you mean 'mail'"),
        ({**MAILBOX, "conditions": ["dead_leters"]}, "Did you mean 'dead_letters'"),
        ({**MAILBOX, "conditions": "all"}, "'warning', 'critical', or a list"),
        ({"webhook": {"url": "https://example.org"}}, "lacks 'secrets'"),
        ({"webhook": {"secrets": [SECRET]}}, "lacks 'url'"),
        ({"webhook": {"url": "https://example.org", "form": "teams"}}, "'json' or 'slack'"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_remedy(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as refused:
        parse_settings({"NOTIFY": wrong})
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(parse_settings({"NOTIFY": {"webhook": {"url": "https://x.org", "secrets": [SECRET]}}}))
