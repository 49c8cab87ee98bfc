"""Messages with a time limit: after it no attempt begins, in any group (decision 207)."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.time_limit import TIMEOUT_HEADER
from tests.contract.benches import Bench

MINUTE = {TIMEOUT_HEADER: "60"}


def message(number: int, timeout: bool = True, **fields: Any) -> Message:
    body = json.dumps({"n": number}).encode()
    return Message(**{"topic": "orders", "body": body, "headers": MINUTE if timeout else {}, **fields})


def test_a_message_is_not_delivered_after_its_limit(any_path: Bench) -> None:
    seen: list[str] = []
    any_path.subscribe(Subscription(topic="orders", group="g"), lambda delivery: seen.append(delivery.key))
    any_path.publish([message(1, key="early")], commit=True)
    any_path.drain()
    any_path.publish([message(2, key="late"), message(3, False, key="no limit")], commit=True)
    any_path.let_time_pass(61)
    any_path.drain()
    assert sorted(seen) == ["early", "no limit"]
    assert any_path.dead_letters("g") == []
    assert any_path.totals_differ() == []


def test_a_retry_after_the_limit_is_not_tried(any_path: Bench) -> None:
    seen: list[tuple[str, int]] = []

    def fail(delivery: Delivery) -> None:
        seen.append((delivery.key, delivery.attempt))
        raise ValueError("not now")

    policy = RetryPolicy(delays_seconds=[30], max_attempts=5)
    any_path.subscribe(Subscription(topic="orders", group="g", retry=policy), fail)
    any_path.publish([message(1, key="a")], commit=True)
    for _ in range(4):
        any_path.drain()
        any_path.let_time_pass(31)
    assert seen == [("a", 1), ("a", 2)]
    assert any_path.dead_letters("g") == []
    assert any_path.totals_differ() == []


def test_the_limit_of_a_delayed_message_counts_from_its_delivery_time(any_path: Bench) -> None:
    seen: list[str] = []
    any_path.subscribe(Subscription(topic="later", group="g"), lambda delivery: seen.append(delivery.key))
    for key in ("in time", "late"):
        any_path.publish([message(1, topic="later", key=key, delay=timedelta(hours=1))], commit=True)
        any_path.let_time_pass(3600 + (30 if key == "in time" else 61))
        any_path.drain()
    assert seen == ["in time"]
    assert any_path.totals_differ() == []
