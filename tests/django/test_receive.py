"""From a queue of RabbitMQ to effects: the role receive, the log, a subscriber with the inbox; killed at each step."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Producer

from outbox import hooks
from outbox.contrib.django.settings.conf import parse_settings
from outbox.contrib.receiving import running
from outbox.errors import ConfigurationError
from tests.django.processes import child, process
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect
from tests.servers import RabbitMQ
from tests.support import eventually

NAME = f"partner-{os.getpid()}"


@pytest.fixture
def receive(rabbitmq_server: RabbitMQ) -> Iterator[dict[str, Any]]:
    """The setting RECEIVE for a queue of this test's own."""
    options = {"url": rabbitmq_server.url, "queue": NAME, "prefetch": 20}
    yield {"partner": {"source": "kombu", "topic": "orders", "batch": 10, "options": options}}
    with Connection(rabbitmq_server.url) as connection:
        Queue(NAME, channel=connection.default_channel).delete()


def send(url: str, *messages: tuple[str, Any], **more: Any) -> None:
    """As another program does, with ids of its own and `more` properties."""
    with Connection(url) as connection:
        producer = Producer(connection.channel())
        Queue(NAME, durable=True, channel=connection.default_channel).declare()
        for message_id, body in messages:
            producer.publish(
                json.dumps(body).encode(),
                routing_key=NAME,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode=2,
                **{"headers": {"outbox-key": body["number"]}, **more},
                **({"message_id": message_id} if message_id else {}),
            )


def test_the_other_receivers_end_if_the_system_refuses_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not end before their threads."""
    waiting = SimpleNamespace(run=lambda stop, on_round: stop.wait(60))
    monkeypatch.setattr(running, "refuse_processes_in_tests", lambda: None)
    monkeypatch.setattr(running, "receiving", lambda names: nullcontext({"first": waiting, "second": waiting}))
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "receive-second":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    stop = threading.Event()
    with pytest.raises(RuntimeError, match="new thread"):
        running.run_receive(stop)
    assert stop.is_set()


def test_every_fault_point_is_armed() -> None:
    # The next test.
    assert [name for name in hooks.fault_points if name.startswith("receive.")] == ["receive.after_send"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("databases")
def test_effects_happen_once_with_any_process_killed_and_any_message_repeated(
    rabbitmq_server: RabbitMQ, receive: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [f"n{n}" for n in range(60)]
    expected = sorted([*numbers, *(f"step-{number}" for number in numbers)])
    given = {"RECEIVE": receive}
    send(rabbitmq_server.url, *((f"id-{number}", {"number": number}) for number in [*numbers, *numbers[::7]]))
    with child("broker"), child("consumer", faults="consumer.after_inbox_commit=kill@7") as consumer:
        with process(
            ["-m", "django", "outbox_worker", "--role", "receive"], outbox=given, faults="receive.after_send=kill@2"
        ) as first:
            assert first.wait(60) == -signal.SIGKILL, "after it was stored, before it was acknowledged"
        assert consumer.wait(60) == -signal.SIGKILL, "after the effect, before its offset"
        with (
            child("consumer"),
            child("check"),
            process(["-m", "django", "outbox_worker", "--role", "receive"], outbox=given) as second,
        ):
            send(rabbitmq_server.url, *((f"id-{number}", {"number": number}) for number in numbers[::5]))
            eventually(
                lambda: Effect.objects.count() >= 120, within_seconds=120, what=lambda: str(Effect.objects.count())
            )
            eventually(lambda: waiting(rabbitmq_server.url) == 0, within_seconds=60, what="all is acknowledged")
            second.send_signal(signal.SIGTERM)
            _, log = second.communicate(timeout=30)
            assert second.returncode == 0, log
    assert sorted(Effect.objects.values_list("number", flat=True)) == expected
    with broker_connection() as (connection, _):
        rows = connection.execute("SELECT count(*) FROM outbox.commit_log WHERE headers ? 'received-id'").fetchall()
        passes = connection.execute("SELECT name FROM outbox.periodic_pass WHERE name LIKE 'receive:%'").fetchall()
    assert (rows, passes) == ([(60,)], [("receive:partner",)])
    for known in (1, 0):
        call_command("outbox_receiver", "forget", "partner")
        assert f"after: forgotten: {known}" in capsys.readouterr().out


def waiting(url: str) -> int:
    """Messages in the queue that no receiver has in hand."""
    with Connection(url) as connection:
        return int(
            Queue(NAME, durable=True, channel=connection.default_channel).queue_declare(passive=True).message_count
        )


@pytest.mark.usefixtures("databases")
@pytest.mark.slow
def test_once_receives_what_is_there_and_poison_ends_it(
    rabbitmq_server: RabbitMQ,
    receive: dict[str, Any],
    outbox_settings: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    outbox_settings(RECEIVE=receive)
    send(rabbitmq_server.url, ("a", {"number": "1"}), ("a", {"number": "1"}))
    call_command("outbox_worker", "--role", "receive", "--drain")
    assert "2 messages stored, 0 put into the poison topic" in capsys.readouterr().out
    send(rabbitmq_server.url, ("", {"number": "2"}))
    with pytest.raises(CommandError, match="has no message id"):
        call_command("outbox_worker", "--role", "receive", "--drain")
    outbox_settings(RECEIVE={"partner": {**receive["partner"], "poison_topic": "payments"}})
    call_command("outbox_worker", "--role", "receive", "--receiver", "partner", "--drain")
    assert "0 messages stored, 1 put into the poison topic" in capsys.readouterr().out


@pytest.mark.usefixtures("databases")
@pytest.mark.slow
def test_one_id_of_two_sources_is_two_messages_of_the_queue(
    rabbitmq_server: RabbitMQ,
    receive: dict[str, Any],
    outbox_settings: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    outbox_settings(RECEIVE=receive)
    for _ in range(2):
        for name in "ab":
            event = {"ce-id": "1", "ce-source": f"/{name}"}
            send(rabbitmq_server.url, ("1", {"number": name}), headers=event)
            send(rabbitmq_server.url, ("2", {"number": name}), app_id=name)
    call_command("outbox_worker", "--role", "receive", "--drain")
    assert "8 messages stored, 0 put into the poison topic" in capsys.readouterr().out
    with broker_connection() as (connection, _):
        rows = connection.execute("SELECT headers FROM outbox.commit_log WHERE headers ? 'received-id'").fetchall()
    assert sorted((row["received-id"], row["received-source"]) for (row,) in rows) == [
        ("1", "/a"),
        ("1", "/b"),
        ("2", "a"),
        ("2", "b"),
    ]


def test_a_declaration_that_cannot_be_right() -> None:
    wrong: list[tuple[Any, str]] = [
        ([], "must be a dictionary"),
        ({"partner": {"topic": "orders"}}, "lacks 'source'"),
        ({"partner": {"topic": "orders", "source": "kombo"}}, "use one of kombu, kafka"),
        ({"partner": {"topic": "orders", "source": "kombu", "poison": "x"}}, "Did you mean 'poison_topic'"),
    ]
    for declared, says in wrong:
        with pytest.raises(ConfigurationError, match=says):
            parse_settings({"RECEIVE": declared})
