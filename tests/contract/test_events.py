"""Typed events on every engine: old versions become new ones, and versions of newer code wait (decision 251)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from outbox.contrib.events import Events
from outbox.events import declaration, event, upcast
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.contract.benches import Bench


@event("orders", version=2)
@dataclass(frozen=True)
class Ordered:
    number: int
    currency: str


@upcast("orders", 1)
def with_currency(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "currency": "EUR"}


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    """What a test declares is forgotten after it."""
    with declaration.restored():
        yield


def message(number: int, version: int | None, topic: str = "orders", **fields: Any) -> Message:
    body: dict[str, Any] = {"number": number, "currency": "SEK"} if version != 1 else {"number": number}
    headers = {} if version is None else {"outbox-event": "orders", "outbox-event-version": str(version)}
    return Message(topic=topic, body=json.dumps(body).encode(), headers=headers, **fields)


def subscription(topic: str = "orders", **options: Any) -> Subscription:
    return Subscription(topic=topic, group="g", options=[Events(Ordered)], retry=RetryPolicy(max_attempts=1), **options)


def test_a_handler_gets_the_event_of_every_version(any_path: Bench) -> None:
    seen: list[Any] = []
    any_path.subscribe(subscription(), lambda delivery: seen.append(delivery.body))
    any_path.publish([message(1, 1), message(2, 2), message(3, None)], commit=True)
    any_path.drain()
    # Without headers, a message counts as version 1.
    assert sorted(seen, key=lambda one: one.number) == [Ordered(1, "EUR"), Ordered(2, "SEK"), Ordered(3, "EUR")]
    assert any_path.dead_letters("g") == []


def test_a_version_of_newer_code_waits_without_an_attempt(any_path: Bench) -> None:
    seen: list[tuple[int, int]] = []
    any_path.subscribe(subscription(), lambda delivery: seen.append((delivery.body.number, delivery.attempt)))
    any_path.publish([message(1, 3), message(2, 2)], commit=True)
    for _ in range(3):
        any_path.drain()
        any_path.let_time_pass(61)
    assert (seen, any_path.dead_letters("g"), any_path.totals_differ()) == ([(2, 1)], [], [])
    # This process now runs the newer code.
    upcast("orders", 3, to=("orders", 2))(dict)
    any_path.drain()
    assert (seen, any_path.dead_letters("g"), any_path.totals_differ()) == ([(2, 1), (1, 1)], [], [])


@pytest.mark.parametrize("any_path", ["two_phase", "atomic"], indirect=True)
def test_a_waiting_message_blocks_only_its_key(any_path: Bench) -> None:
    seen: list[int] = []
    any_path.subscribe(subscription("steps", mode=Mode.KEY_ORDERED), lambda delivery: seen.append(delivery.body.number))
    any_path.publish([message(1, 3, "steps", key="a"), message(2, 2, "steps", key="a")], commit=True)
    any_path.publish([message(3, 2, "steps", key="b")], commit=True)
    any_path.drain()
    assert (seen, any_path.dead_letters("g")) == ([3], [])
    upcast("orders", 3, to=("orders", 2))(dict)
    any_path.drain()
    assert (seen, any_path.dead_letters("g"), any_path.totals_differ()) == ([3, 1, 2], [], [])


def test_a_batch_has_only_the_events_that_this_code_knows(any_path: Bench) -> None:
    seen: list[int] = []

    def handle(deliveries: Sequence[Delivery[Ordered]]) -> None:
        seen.extend(delivery.body.number for delivery in deliveries)

    any_path.subscribe(subscription(batch=3), handle)
    any_path.publish([message(1, 2), message(2, 3), message(3, 1)], commit=True)
    any_path.drain()
    assert (sorted(seen), any_path.dead_letters("g")) == ([1, 3], [])


# Body, version, and the reason of its dead letter.
HOPELESS = [
    ({"number": "1", "currency": "EUR"}, "2", "number: expected a whole number"),
    ({"number": 1}, "2", "currency: the field is required and absent"),
    ({}, "two", "must be a whole number"),
    ([], "1", "with_currency, failed at a body that was published as version 1"),
]


def test_a_body_that_no_wait_can_mend_becomes_a_dead_letter(any_path: Bench) -> None:
    any_path.subscribe(subscription(), lambda delivery: pytest.fail("the handler was called"))
    reasons = {}
    for body, version, reason in HOPELESS:
        headers = {"outbox-event": "orders", "outbox-event-version": version}
        bad = Message(topic="orders", body=json.dumps(body).encode(), headers=headers)
        any_path.publish([bad], commit=True)
        reasons[bad.message_id] = reason
    any_path.drain()
    errors = dict(any_path.dead_letters("g"))
    assert errors.keys() == reasons.keys()
    assert [reason for message_id, reason in reasons.items() if reason not in errors[message_id]] == []
