"""A feature that an engine lacks is refused, with the way that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox.contrib.django.engine.memory import MemoryEngine
from outbox.contrib.django.engine.postgres import PostgresEngine
from outbox.errors import ConfigurationError, NotSupported
from outbox.ports import Broker, Consumers
from outbox.refusals import Refusals
from outbox.rocketmq.declarations import REFUSALS, check_topics, topic_problems
from outbox.subscription import Mode, OnError, Start, Subscription
from outbox.topic import MessageType, Topic

ROOT = Path(__file__).resolve().parent.parent.parent
EVERYTHING = Refusals("everything")
FIFO = Topic(name="steps", types=frozenset({MessageType.FIFO}))
MIXED = Topic(name="orders")


def test_a_topic_of_types_that_exclude_each_other_is_refused() -> None:
    topic = Topic(name="orders", types=frozenset({MessageType.FIFO, MessageType.DELAY}))
    (refused,) = REFUSALS.of_topic(topic)
    assert refused.startswith("topic 'orders': the engine RocketMQ has no")
    assert "two topics" in refused
    assert list(EVERYTHING.of_topic(topic)) == []
    with pytest.raises(ConfigurationError, match="has no"):
        check_topics([topic])


def test_a_topic_with_an_option_of_the_bundled_broker_is_refused() -> None:
    for topic, what in (
        (Topic(name="orders", backlog_limit=5), "limits of a topic's backlog"),
        (Topic(name="orders", searchable=True), "option for an index of keys"),
    ):
        (refused,) = REFUSALS.of_topic(topic)
        assert f"the engine RocketMQ has no {what}" in refused
        assert list(EVERYTHING.of_topic(topic)) == []


def test_a_subscription_it_cannot_serve_is_refused() -> None:
    lacking: list[tuple[dict[str, Any], Topic | None]] = [
        ({"broadcast": True}, MIXED),
        ({"mode": Mode.KEY_ORDERED}, MIXED),
        ({"mode": Mode.ORDERLY}, None),
        ({"start": Start.LATEST}, MIXED),
        ({"on_error": {ValueError: OnError.STOP}}, MIXED),
    ]
    for options, topic in lacking:
        wanted = Subscription(group="g", topic="orders", **options)
        (refused,) = REFUSALS.of_subscription(wanted, topic)
        assert "group 'g' on topic 'orders': the engine RocketMQ has no" in refused
        assert list(EVERYTHING.of_subscription(wanted, topic)) == []


def test_what_it_can_do_is_not_refused() -> None:
    assert list(REFUSALS.of_topic(MIXED)) == []
    assert list(REFUSALS.of_subscription(Subscription(group="g", topic="orders", batch=5), MIXED)) == []
    ordered = Subscription(group="g", topic="steps", mode=Mode.ORDERLY)
    assert list(REFUSALS.of_subscription(ordered, FIFO)) == []


def test_a_handler_without_the_inbox_is_refused() -> None:
    (refused,) = REFUSALS.of_subscription(Subscription(group="g", topic="orders"), MIXED, inbox=False)
    assert "idempotent=False" in refused


def test_a_refused_call_names_what_works() -> None:
    EVERYTHING.require("recall", "recall")
    REFUSALS.require("hint_one_way", "a hint")
    with pytest.raises(NotSupported, match=r"^recall: the engine RocketMQ has no .*\. Let the handler check"):
        REFUSALS.require("recall", "recall")


def test_refused_calls_are_methods_of_the_ports_or_commands() -> None:
    ports = {name for port in (Broker, Consumers) for name in vars(port)}
    for refusals in (REFUSALS, MemoryEngine.refusals, PostgresEngine.refusals):
        assert set(refusals.calls) - ports <= {"install", "left"}


def test_names_that_are_one_on_the_server_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'order\.paid' and 'order-paid' are both 'order-paid'"):
        check_topics([Topic(name="order.paid"), Topic(name="order-paid")])


def test_a_topic_of_the_server_is_held_against_the_declared_one() -> None:
    normal, transaction = 1, 4
    assert list(topic_problems(MIXED, frozenset({normal, transaction}))) == []
    assert "create it with message.type=MIXED and 8 queues" in "".join(topic_problems(MIXED, None))
    assert "does not take TRANSACTION" in "".join(topic_problems(MIXED, frozenset({normal})))


def test_the_page_has_every_refusal() -> None:
    page = " ".join((ROOT / "docs" / "maintainers" / "rocketmq-operations.md").read_text(encoding="utf-8").split())
    rules = [rule for _, rule in (*REFUSALS.topics, *REFUSALS.subscriptions)]
    rows = [f"| {rule.lacks} | {rule.instead} |" for rule in (*rules, *REFUSALS.calls.values())]
    assert sorted({row for row in rows if row not in page}) == []
