"""Consumption: every broker must do this alike, for both paths of a message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox.errors import PartialFailure, PermanentError
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import OnError, Subscription
from tests.contract.benches import Bench

AT_ONCE = RetryPolicy(delays_seconds=[0], max_attempts=3)


def messages(count: int, **fields: Any) -> list[Message]:
    return [Message(topic=fields.pop("topic", "orders"), body=f'{{"n":{n}}}'.encode(), **fields) for n in range(count)]


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return sorted(delivery.body["n"] for delivery in deliveries)


def test_every_group_handles_every_message_once(any_path: Bench) -> None:
    seen: dict[str, list[Delivery]] = {"logistics": [], "points": []}
    any_path.publish(messages(30), commit=True)
    for group, received in seen.items():
        any_path.subscribe(Subscription(group=group, topic="orders"), received.append)
    any_path.drain()
    any_path.drain()
    assert numbers(seen["logistics"]) == numbers(seen["points"]) == list(range(30))


def test_delivery_has_the_fields_of_the_published_message(any_path: Bench) -> None:
    received: list[Delivery] = []
    sent = Message(topic="orders", body=b'{"n":7}', key="7", tag="paid", headers={"region": "eu"})
    any_path.subscribe(Subscription(group="points", topic="orders"), received.append)
    any_path.publish([sent], commit=True)
    any_path.drain()
    (delivery,) = received
    assert (delivery.body, delivery.key, delivery.tag, dict(delivery.headers)) == (
        {"n": 7},
        "7",
        "paid",
        {"region": "eu"},
    )
    assert (delivery.message_id, delivery.topic, delivery.group, delivery.attempt) == (
        sent.message_id,
        "orders",
        "points",
        1,
    )


def test_messages_of_one_key_keep_their_order(any_path: Bench) -> None:
    received: list[Delivery] = []
    any_path.subscribe(Subscription(group="points", topic="steps", threads=1), received.append)
    for n in range(20):
        any_path.publish([Message(topic="steps", body=f'{{"n":{n}}}'.encode(), key=f"k{n % 3}")], commit=True)
    any_path.drain()
    for key in ("k0", "k1", "k2"):
        of_key = [delivery.body["n"] for delivery in received if delivery.key == key]
        assert of_key == sorted(of_key)
    assert numbers(received) == list(range(20))


def test_filter_selects_messages(any_path: Bench) -> None:
    selected = {
        "paid": [0],
        "paid || refunded": [0, 1],
        "sql: region = 'eu' AND amount > 10": [1],
        "": [0, 1, 2],
    }
    received: dict[str, list[Delivery]] = {expression: [] for expression in selected}
    for number, (expression, deliveries) in enumerate(received.items()):
        group = Subscription(group=f"points-{number}", topic="orders", filter=expression)
        any_path.subscribe(group, deliveries.append)
    tagged = [("paid", "eu", "5"), ("refunded", "eu", "20"), ("shipped", "us", "30")]
    batch = [
        Message(topic="orders", body=f'{{"n":{n}}}'.encode(), tag=tag, headers={"region": region, "amount": amount})
        for n, (tag, region, amount) in enumerate(tagged)
    ]
    any_path.publish(batch, commit=True)
    any_path.drain()
    assert {expression: numbers(deliveries) for expression, deliveries in received.items()} == selected


def test_failed_message_is_tried_again(any_path: Bench) -> None:
    attempts: list[int] = []

    def fail_twice(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt < 3:
            raise ConnectionError("warehouse unreachable")

    any_path.subscribe(Subscription(group="points", topic="orders", retry=AT_ONCE), fail_twice)
    any_path.publish(messages(1), commit=True)
    any_path.drain()
    assert attempts == [1, 2, 3]
    assert any_path.dead_letters("points") == []


def test_after_the_last_attempt_it_is_a_dead_letter(any_path: Bench) -> None:
    attempts: list[int] = []

    def fail(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        raise ConnectionError("warehouse unreachable")

    sent = messages(1)
    any_path.subscribe(Subscription(group="points", topic="orders", retry=AT_ONCE), fail)
    any_path.publish(sent, commit=True)
    any_path.drain()
    assert attempts == [1, 2, 3]
    ((message_id, error),) = any_path.dead_letters("points")
    assert message_id == sent[0].message_id
    assert "ConnectionError: warehouse unreachable" in error


def test_hopeless_message_is_a_dead_letter_at_once(any_path: Bench) -> None:
    """By a permanent error, and by the policy."""
    attempts: list[int] = []

    def fail(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        raise PermanentError("no such product") if delivery.body["n"] == 0 else KeyError("sku")

    on_error: dict[type[BaseException], OnError] = {KeyError: OnError.DEAD_LETTER}
    any_path.subscribe(Subscription(group="points", topic="orders", retry=AT_ONCE, on_error=on_error), fail)
    any_path.publish(messages(2), commit=True)
    any_path.drain()
    assert attempts == [1, 1]
    assert len(any_path.dead_letters("points")) == 2


def test_undecodable_body_is_a_dead_letter_and_blocks_no_other_message(any_path: Bench) -> None:
    received: list[Delivery] = []
    broken = Message(topic="orders", body=b"{", key="broken")
    any_path.subscribe(Subscription(group="points", topic="orders"), received.append)
    any_path.publish([broken, *messages(3)], commit=True)
    any_path.drain()
    assert numbers(received) == [0, 1, 2]
    ((message_id, error),) = any_path.dead_letters("points")
    assert message_id == broken.message_id
    assert "not valid application/json" in error


def test_batch_handler_gets_lists_and_may_fail_in_part(any_path: Bench) -> None:
    calls: list[list[int]] = []

    def handle(batch: Sequence[Delivery]) -> None:
        calls.append([delivery.body["n"] for delivery in batch])
        odd = {d.message_id: ValueError("odd") for d in batch if d.body["n"] % 2 and d.attempt == 1}
        if odd:
            raise PartialFailure(odd)

    any_path.subscribe(Subscription(group="points", topic="orders", batch=10, retry=AT_ONCE), handle)
    any_path.publish(messages(20), commit=True)
    any_path.drain()
    handled = sorted(number for call in calls for number in call)
    assert handled == sorted([*range(20), *range(1, 20, 2)])
    assert max(len(call) for call in calls) <= 10
    assert any_path.dead_letters("points") == []


def test_one_poison_message_takes_none_of_its_batch_along(any_path: Bench) -> None:
    handled: list[int] = []

    def handle(batch: Sequence[Delivery]) -> None:
        ns = [delivery.body["n"] for delivery in batch]
        if 4 in ns:
            raise ValueError("cannot read the order")
        handled.extend(ns)

    sent = messages(10)
    any_path.subscribe(Subscription(group="points", topic="orders", batch=10, retry=AT_ONCE), handle)
    any_path.publish(sent, commit=True)
    any_path.drain()
    assert sorted(handled) == [n for n in range(10) if n != 4]
    assert [message_id for message_id, _ in any_path.dead_letters("points")] == [sent[4].message_id]


def test_delayed_message_waits_for_its_time(any_path: Bench) -> None:
    now = datetime.now(UTC)
    late = Message(topic="later", body=b'{"n":1}', deliver_at=now + timedelta(hours=1))
    due = Message(topic="later", body=b'{"n":2}', deliver_at=now - timedelta(hours=1))
    any_path.publish([late, due], commit=True)
    assert [m.message_id for m in any_path.visible("later")] == [due.message_id]
