"""OUTBOX['FORWARD'] and `outbox_worker --role forward`."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.operations.checks import check_databases
from outbox.contrib.django.settings.conf import parse_settings
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.contrib.forwarding.running import forwarding
from outbox.errors import ConfigurationError
from outbox.message import SendReceipt
from tests.django.processes import process
from tests.django.shop.models import Order
from tests.django.support import sequence
from tests.sinks.receiver import SECRET, Request, keeping, serving
from tests.support import eventually

WEBHOOK: dict[str, Any] = {"topics": ["orders"], "sink": "webhook", "options": {"url": "https://x.test/"}}


def webhook(port: int, **options: Any) -> dict[str, Any]:
    given = {"url": f"http://127.0.0.1:{port}/", "secrets": [SECRET], "allow_private": True, "allow_http": True}
    return {"topics": {"orders": "shop.orders"}, "sink": "webhook", "options": {**given, **options}}


def place(number: str) -> SendReceipt:
    with transaction.atomic():
        Order.objects.create(number=number)
        return publish("orders", {"number": number}, key=number, tag="odd" if int(number) % 2 else "even")


@pytest.mark.usefixtures("databases")
def test_once_sends_what_is_queued_under_its_name_there(
    outbox_settings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[Request] = []
    with serving(keeping(got)) as port:
        outbox_settings(FORWARD={"billing": {**webhook(port), "filter": "odd", "format": "plain"}})
        for number in range(10):
            place(str(number))
        sequence()
        call_command("outbox_worker", "--role", "forward", "--drain")
        call_command("outbox_worker", "--role", "forward", "--group", "billing", "--drain")
    assert "5 messages forwarded, 0 attempts failed" in capsys.readouterr().out
    assert sorted(json.loads(request.body)["number"] for request in got) == ["1", "3", "5", "7", "9"]
    assert {request.headers["outbox-topic"] for request in got} == {"shop.orders"}


@pytest.mark.slow
@pytest.mark.usefixtures("databases")
def test_the_command_forwards_until_a_signal_stops_it() -> None:
    got: list[Request] = []
    with serving(keeping(got)) as port:
        forward = {"FORWARD": {"billing": webhook(port)}}
        with process(["-m", "outbox.contrib.django.worker.child", "broker"]):
            with process(["-m", "django", "outbox_worker", "--role", "forward"], outbox=forward) as forwarding:
                place("1")
                eventually(lambda: len(got) == 1, within_seconds=60, what="it is forwarded")
                forwarding.send_signal(signal.SIGTERM)
                _, log = forwarding.communicate(timeout=30)
                assert forwarding.returncode == 0, log


def test_a_declaration_that_cannot_be_right() -> None:
    wrong: list[tuple[Any, str]] = [
        ([], "must be a dictionary"),
        ({"billing": []}, "must be a dictionary"),
        ({"no way": WEBHOOK}, "is not allowed"),
        ({"billing": {"sink": "webhook"}}, "lacks 'topics'"),
        ({"billing": {"topics": ["orders"]}}, "lacks 'sink'"),
        ({"billing": {**WEBHOOK, "sink": "webhok"}}, "use one of webhook, kombu, kafka"),
        ({"billing": {**WEBHOOK, "topics": "orders"}}, "a list of topics"),
        ({"billing": {**WEBHOOK, "format": "xml"}}, "cloudevents-binary"),
        ({"billing": {**WEBHOOK, "filter": "sql:a >"}}, "filter"),
        ({"billing": {**WEBHOOK, "on_rejected": "skip"}}, "'block'"),
        ({"billing": {**WEBHOOK, "thread": 3}}, "Did you mean 'threads'"),
    ]
    for forward, says in wrong:
        with pytest.raises(ConfigurationError, match=says):
            parse_settings({"FORWARD": forward})


def test_what_the_command_refuses(outbox_settings: Callable[..., None]) -> None:
    wrong: list[tuple[Any, list[str], str]] = [
        ({}, [], "declares nothing"),
        ({"billing": WEBHOOK}, ["--group", "biling"], "it has billing"),
        ({"billing": WEBHOOK}, [], "missing 1 required keyword-only argument: 'secrets'"),
        ({"billing": {**WEBHOOK, "sink": "outbox.nothing"}}, [], "cannot be imported"),
        ({"billing": {**WEBHOOK, "options": {"url": "https://x.test/", "secrets": ["s3cret"]}}}, [], "whsec_"),
    ]
    for forward, arguments, says in wrong:
        outbox_settings(FORWARD=forward)
        with pytest.raises(CommandError, match=says) as failure:
            call_command("outbox_worker", "--role", "forward", "--drain", *arguments)
        assert "s3cret" not in str(failure.value)


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_a_group_that_is_new_to_a_topic_declares_its_start_in_its_setting(
    outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    subscriber("orders", group="shipping")(lambda delivery: None)
    publish("orders", {}, at_once=True)
    sequence()
    consumer_runtime(groups=["shipping"]).run_once()

    def warned() -> list[str]:
        return [one.msg.split("'")[1] for one in check_databases(databases=["broker"]) if one.id == "outbox.W032"]

    declared = {**WEBHOOK, "options": {"url": "https://127.0.0.1:9/", "secrets": [SECRET]}}
    outbox_settings(FORWARD={"billing": declared})
    assert warned() == ["billing"]
    with caplog.at_level(logging.WARNING), forwarding():
        assert "'billing' is new to the topic 'orders'" in caplog.text
    outbox_settings(FORWARD={"billing": {**declared, "start": "latest"}})
    assert warned() == []
