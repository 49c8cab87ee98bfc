"""OUTBOX['BROKER'] = 'rocketmq://…': `check` names declarations that are not possible there, without any server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from outbox import hooks
from outbox.contrib.django import subscriber
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.operations import checks
from outbox.contrib.django.settings.conf import get_settings, parse_settings
from outbox.contrib.rocketmq import relaying
from outbox.errors import ConfigurationError

GOOD: Mapping[str, Any] = {
    "BROKER": "rocketmq://127.0.0.1:1?brokers=h:2",
    "TOPICS": {"orders": {}, "steps": {"types": ["FIFO"]}},
}


FORWARD = {"billing": {"topics": ["orders"], "sink": "kombu", "options": {"url": "memory://"}}}
RECEIVE = {"partner": {"source": "kombu", "topic": "orders", "options": {"url": "memory://", "queue": "orders"}}}


@pytest.fixture(autouse=True)
def on_rocketmq(outbox_settings: Callable[..., None], no_subscribers: None) -> None:
    outbox_settings(**GOOD)


def test_an_address_without_brokers_is_a_warning(outbox_settings: Callable[..., None]) -> None:
    """Exhausted checks are in a topic that the proxy does not let clients read."""
    outbox_settings(**{**GOOD, "BROKER": "rocketmq://127.0.0.1:1"})
    (problem,) = engine_of(get_settings()).check()
    assert problem.id == "outbox.W033" and "?brokers=BROKER:10911" in str(problem.hint)
    engine_of(get_settings()).require()


def test_a_project_that_it_can_run_has_no_problem() -> None:
    @subscriber("orders", group="points")
    def handle(delivery: object) -> None: ...

    assert [item for item in checks.check_settings() if item.id in ("outbox.E002", "outbox.E031")] == []
    engine_of(get_settings()).require()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PRODUCER_GROUP": ""}, "PRODUCER_GROUP"),
        ({"BROKER": "rocketmq://"}, "'' must be HOST:PORT"),
        ({"BROKER": "rocketmq://h:1?brokers=h"}, "'h' must be HOST:PORT, the listenPort of a broker"),
        ({"BROKER": "rocketmq://a:1,b:1?brokers=h:2"}, "several proxies only as IP addresses"),
        ({"BROKER": "rocketmq://key@h:1?brokers=h:2"}, "credentials are ACCESS_KEY:SECRET"),
        ({"BROKER": "rocketmq://h:1?brokers=h:2&tls=yes"}, "?tls=yes must be 'proxy'"),
        ({"BROKER": "rocketmq://h:1?brokers=h:2&namespace=a.b"}, "?namespace='a.b' must have"),
        ({"BROKER": "rocketmq://h:1?broker=h:2"}, "has an unknown option 'broker'"),
        ({"TOPICS": {"steps": {"types": ["FIFO", "DELAY", "TRANSACTION"]}}}, "delivery times on FIFO topics"),
        ({"FORWARD": FORWARD}, "or let a @subscriber send the messages"),
        ({"RECEIVE": RECEIVE}, "or let the sender publish to the other broker"),
    ],
)
def test_what_it_cannot_run_is_an_error(
    outbox_settings: Callable[..., None], changed: Mapping[str, Any], said: str
) -> None:
    settings = {**GOOD, **changed}
    if changed.get("PRODUCER_GROUP") == "":
        from django.conf import settings as django_settings

        django_settings.OUTBOX.pop("PRODUCER_GROUP")
        settings.pop("PRODUCER_GROUP")
    outbox_settings(**settings)
    (problem,) = engine_of(get_settings()).check()
    assert problem.id == "outbox.E031"
    assert said in problem.msg
    with pytest.raises(ConfigurationError):
        engine_of(get_settings()).require()


@pytest.mark.parametrize("options", [{"idempotent": False}, {"mode": "orderly"}, {"broadcast": True}])
def test_a_subscriber_it_cannot_serve_is_an_error(options: Mapping[str, Any]) -> None:
    @subscriber("orders", group="points", **options)
    def handle(delivery: object) -> None: ...

    assert {item.id for item in checks.check_settings()} == {"outbox.E031"}


def test_a_group_that_mixes_orders_is_an_error() -> None:
    @subscriber("orders", group="points")
    def handle(delivery: object) -> None: ...

    @subscriber("steps", group="points", mode="orderly")
    def step(delivery: object) -> None: ...

    (problem,) = engine_of(get_settings()).check()
    assert "group 'points' consumes one topic in order and another concurrently" in problem.msg


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("outbox_worker --role forward", {"FORWARD": FORWARD}),
        ("outbox_worker --role receive", {"RECEIVE": RECEIVE}),
    ],
)
def test_what_check_refuses_does_not_start(
    outbox_settings: Callable[..., None], command: str, changed: Mapping[str, Any]
) -> None:
    outbox_settings(**GOOD, **changed)
    with pytest.raises(CommandError, match=f"run {command} with settings whose BROKER"):
        call_command(*command.split(), "--drain")


@pytest.mark.parametrize("types", [["FIFO", "TRANSACTION"], ["NORMAL", "DELAY", "TRANSACTION"], ["FIFO"]])
def test_a_worker_starts_a_relay_only_for_topics_that_need_it(
    outbox_settings: Callable[..., None], types: list[str]
) -> None:
    outbox_settings(**{**GOOD, "TOPICS": {"orders": {}, "steps": {"types": types}}})
    assert relaying.is_needed() is ("TRANSACTION" in types)


def test_without_its_app_the_error_names_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(hooks.engines, "rocketmq")
    with pytest.raises(ConfigurationError) as raised:
        parse_settings({"BROKER": "rocketmq://key:secret@h:1"})
    assert str(raised.value) == (
        "OUTBOX['BROKER'] = 'rocketmq://…' is the address of no installed engine: add 'outbox.contrib.rocketmq' to "
        "INSTALLED_APPS."
    )
    with pytest.raises(ConfigurationError, match=r"'amqp://…' is the address of no .*: write an alias of DATABASES"):
        parse_settings({"BROKER": "amqp://h"})
