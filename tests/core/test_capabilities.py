"""A feature that an engine lacks is refused, with the way that works."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.capabilities import Capability, Engine
from outbox.errors import ConfigurationError, NotSupported
from outbox.rocketmq.engine import ENGINE, check_topics, topic_problems
from outbox.subscription import Mode, Subscription
from outbox.topic import MessageType, Topic

EVERYTHING = Engine("everything", frozenset(Capability))
FIFO = Topic(name="steps", types=frozenset({MessageType.FIFO}))
MIXED = Topic(name="orders")


@pytest.mark.parametrize(
    ("types", "way_out"),
    [
        ({"FIFO", "TRANSACTION"}, "PostgreSQL"),
        ({"DELAY", "TRANSACTION", "NORMAL"}, "two topics"),
        ({"FIFO", "DELAY"}, "two topics"),
    ],
)
def test_a_topic_of_types_that_exclude_each_other_is_refused(types: set[str], way_out: str) -> None:
    topic = Topic(name="orders", types=frozenset(map(MessageType, types)))
    (refused,) = ENGINE.topic_refusals(topic)
    assert refused.startswith("topic 'orders': the engine RocketMQ has no")
    assert way_out in refused
    assert list(EVERYTHING.topic_refusals(topic)) == []
    with pytest.raises(ConfigurationError, match="has no"):
        check_topics([topic])


@pytest.mark.parametrize(
    ("options", "topic"),
    [
        ({"broadcast": True}, MIXED),
        ({"mode": "key_ordered"}, MIXED),
        ({"mode": "orderly"}, None),
        ({"start": "latest"}, MIXED),
        ({"on_error": {ValueError: "stop"}}, MIXED),
    ],
)
def test_a_subscription_it_cannot_serve_is_refused(options: dict[str, Any], topic: Topic | None) -> None:
    wanted = Subscription(group="g", topic="orders", **options)
    (refused,) = ENGINE.subscription_refusals(wanted, topic)
    assert "group 'g' on topic 'orders': the engine RocketMQ has no" in refused
    assert list(EVERYTHING.subscription_refusals(wanted, topic)) == []


def test_what_it_can_do_is_not_refused() -> None:
    assert list(ENGINE.topic_refusals(MIXED)) == []
    assert list(ENGINE.subscription_refusals(Subscription(group="g", topic="orders", batch=5), MIXED)) == []
    ordered = Subscription(group="g", topic="steps", mode=Mode.ORDERLY)
    assert list(ENGINE.subscription_refusals(ordered, FIFO)) == []


def test_a_handler_without_the_inbox_is_refused() -> None:
    (refused,) = ENGINE.subscription_refusals(Subscription(group="g", topic="orders"), MIXED, inbox=False)
    assert "idempotent=False" in refused


def test_a_call_that_it_cannot_do_names_the_way_that_works() -> None:
    EVERYTHING.require(Capability.RECALL, "recall", "Nothing.")
    with pytest.raises(NotSupported, match=r"recall: the engine RocketMQ has no .*\. Do this\."):
        ENGINE.require(Capability.RECALL, "recall", "Do this.")


def test_names_that_are_one_on_the_server_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'order\.paid' and 'order-paid' are both 'order-paid'"):
        check_topics([Topic(name="order.paid"), Topic(name="order-paid")])


def test_a_topic_of_the_server_is_held_against_the_declared_one() -> None:
    normal, transaction = 1, 4
    assert list(topic_problems(MIXED, frozenset({normal, transaction}))) == []
    assert "create it with message.type=MIXED and 8 queues" in "".join(topic_problems(MIXED, None))
    assert "does not take TRANSACTION" in "".join(topic_problems(MIXED, frozenset({normal})))
