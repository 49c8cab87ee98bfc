"""The rows of the relay, without a RocketMQ server: what a transaction stores, and what the relay takes in which order.

The broker of these tests stores what it is sent. tests/rocketmq/test_relay.py runs the relay with the real server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast
from uuid import UUID

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from outbox.contrib.django import message, publish, publish_messages, recall, transactional_message
from outbox.contrib.rocketmq import relay_rows
from outbox.contrib.rocketmq.models import RelayLease
from outbox.contrib.rocketmq.relay_rows import backlog, rows_on
from outbox.contrib.rocketmq.relaying import LINES, MESSAGES_PER_LINE, Relay, RelayCounts
from outbox.errors import InvalidMessage, MessageTypeMismatch, NotSupported, SendFailed, TransactionUsageError
from outbox.message import Message, SendReceipt
from outbox.ports import Broker
from tests.django.shop.models import Order
from tests.django.state import rolled_back

pytestmark = pytest.mark.usefixtures("application")

TOPICS = {"steps": {"types": ["FIFO", "TRANSACTION"]}, "later": {"types": ["NORMAL", "DELAY", "TRANSACTION"]}}


class Stored:
    """A broker that stores what it is sent, and refuses the bodies in `rejected` and `failing`."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.rejected: set[str] = set()
        self.failing: set[str] = set()
        self.before_send: Callable[[str], None] = lambda body: None

    def send(self, messages: Sequence[Message], *, timeout_seconds: float, committed: bool) -> list[SendReceipt]:
        [one] = messages
        body = one.body.decode()
        self.before_send(body)
        if body in self.rejected:
            raise InvalidMessage(f"{body} is too long")
        if body in self.failing:
            raise SendFailed("the server does not answer")
        self.bodies.append(body)
        return []


@pytest.fixture(autouse=True)
def on_rocketmq(outbox_settings: Callable[..., None], no_subscribers: None) -> None:
    outbox_settings(BROKER="rocketmq://127.0.0.1:1?brokers=127.0.0.1:1", PRODUCER_GROUP="shop", TOPICS=TOPICS)


@pytest.fixture(params=["default", "lite"])
def alias(request: pytest.FixtureRequest) -> str:
    """An application database on PostgreSQL, and one on SQLite."""
    return str(request.param)


def relay_of(alias: str, broker: Stored, *, lease_seconds: float = 60) -> Relay:
    relay = Relay(
        alias,
        cast(Broker, broker),
        lambda error: isinstance(error, InvalidMessage),
        lease_seconds=lease_seconds,
        send_seconds=1,
    )
    # SQLite's database in memory belongs to one thread.
    relay._threads = _OneThread()  # type: ignore[assignment]
    return relay


class _OneThread:
    map = staticmethod(map)

    def shutdown(self) -> None: ...


def store(alias: str, *bodies: str) -> list[UUID]:
    """Messages whose key is the first letter of the body."""
    with transaction.atomic(using=alias):
        return [publish_raw(alias, body) for body in bodies]


def publish_raw(alias: str, body: str) -> UUID:
    one = Message(topic="steps", body=body.encode(), key=body[0])
    relay_rows.store(connections[alias], [one], [True], transaction_id=one.message_id)
    return one.message_id


def expire_lease(alias: str) -> None:
    RelayLease._base_manager.using(alias).update(expires_at=Now())


def test_a_transaction_stores_its_messages_and_a_rollback_removes_them() -> None:
    @transactional_message("steps", key=lambda number: number, body=lambda number: number)
    def decorated(number: str) -> None:
        Order.objects.create(number=number)

    decorated("a")
    with transaction.atomic():
        receipts = publish_messages([message("steps", "b", key="k"), message("later", "c", delay=60)])
        with rolled_back():
            publish("steps", "gone", key="k")
    found = [(row.topic, row.key, bytes(row.body), row.message_id) for row in rows_on("default").order_by("sequence")]
    assert found == [
        ("steps", "a", b'"a"', found[0][3]),
        ("steps", "k", b'"b"', receipts[0].message_id),
        ("later", "", b'"c"', receipts[1].message_id),
    ]
    assert {one.transaction_id for one in receipts} == {receipts[0].message_id}


def test_a_unique_message_is_stored_once() -> None:
    unique = pytest.importorskip("outbox.contrib.unique")
    with transaction.atomic():
        first, second = (publish("steps", number, unique.Unique("one", within=60), key="k") for number in range(2))
    assert (first.duplicate_of, second.duplicate_of) == (None, first.message_id)
    assert backlog("default").waiting == 1


def test_what_rocketmq_would_reject_is_refused_before_the_commit() -> None:
    with pytest.raises(InvalidMessage), transaction.atomic():
        publish("steps", 1)
    with pytest.raises(InvalidMessage), transaction.atomic():
        publish("later", 1, key="k" * 255, headers={"a": "é" * 4000}, delay=5)
    with pytest.raises(MessageTypeMismatch), transaction.atomic():
        publish("steps", 1, key="k", delay=5)
    assert not rows_on("default").exists()


def test_outside_of_a_transaction_a_message_would_pass_the_waiting_ones() -> None:
    with pytest.raises(MessageTypeMismatch, match="Publish it inside"):
        publish("steps", 1, key="k", at_once=True)


def test_a_line_is_sent_in_order_and_a_rejected_message_blocks_only_its_line(alias: str) -> None:
    broker = Stored()
    broker.rejected = {"a2"}
    ids = store(alias, "a1", "b1", "a2", "a3", "b2")
    relay = relay_of(alias, broker)
    assert relay.run_once() == RelayCounts(sent=3, parked=1, more=True)
    assert [one for one in broker.bodies if one[0] == "a"] == ["a1"]
    assert [one for one in broker.bodies if one[0] == "b"] == ["b1", "b2"]
    assert relay.run_once() == RelayCounts()
    [row] = rows_on(alias).filter(parked_at__isnull=False)
    assert (row.state, row.error) == ("parked", "InvalidMessage: a2 is too long")
    broker.rejected = set()
    assert relay_rows.retry(alias, ids[2]) == 1
    relay.run_once()
    assert broker.bodies[-2:] == ["a2", "a3"] and not rows_on(alias).exists()


def test_a_failing_message_is_tried_again_before_the_next_one_of_its_line(alias: str) -> None:
    broker = Stored()
    broker.failing = {"a1"}
    store(alias, "a1", "a2")
    relay = relay_of(alias, broker)
    assert relay.run_once() == RelayCounts(failed=1)
    assert relay.run_once() == RelayCounts(), "the line waits for its pause"
    rows_on(alias).update(due_at=Now())
    broker.failing = set()
    assert relay.run_once().sent == 2
    assert broker.bodies == ["a1", "a2"]


def test_only_the_relay_with_the_lease_sends(alias: str) -> None:
    first, second = Stored(), Stored()
    relay, other = relay_of(alias, first), relay_of(alias, second)
    store(alias, "a1")
    assert relay.run_once().sent == 1
    store(alias, "a2")
    assert other.run_once() == RelayCounts(has_lease=False)
    relay.close()
    assert other.run_once().sent == 1
    assert (first.bodies, second.bodies) == (["a1"], ["a2"])


def test_a_relay_that_lost_its_lease_takes_nothing_and_sends_nothing_more(alias: str) -> None:
    """The first relay believes that it has the lease; the database knows better. Or it freezes before a send."""
    first, second = Stored(), Stored()
    relay, other = relay_of(alias, first), relay_of(alias, second)
    relay.run_once()
    expire_lease(alias)
    store(alias, "a1", "a2")
    assert relay.run_once() == RelayCounts(has_lease=False)
    assert other.run_once().sent == 2
    expire_lease(alias)

    def freeze(body: str) -> None:
        relay._until = 0.0
        expire_lease(alias)
        assert other.run_once().sent == 2

    first.before_send = freeze
    other._until = 0.0
    store(alias, "a3", "a4")
    relay.run_once()
    assert first.bodies == ["a3"], "the send that had begun is a duplicate, and no further one begins"
    assert second.bodies == ["a1", "a2", "a3", "a4"]


@pytest.mark.parametrize("alias", ["lite", pytest.param("default", marks=pytest.mark.slow)], indirect=True)
def test_lines_are_served_in_turn(alias: str) -> None:
    """A line with many messages, and more lines than one round serves: each gets its turn."""
    broker = Stored()
    relay = relay_of(alias, broker)
    store(alias, *(f"a{number}" for number in range(2 * MESSAGES_PER_LINE)), "b0")
    assert relay.run_once() == RelayCounts(sent=MESSAGES_PER_LINE + 1, more=True)
    assert "b0" in broker.bodies
    assert relay.run_once().sent == MESSAGES_PER_LINE and relay.run_once() == RelayCounts()
    letters = [chr(number) for number in range(256, 256 + LINES + 10)]
    store(alias, *(f"{letter}{number}" for number in range(MESSAGES_PER_LINE + 1) for letter in letters))
    begun = set(letters)
    for _ in itertools.repeat(None, 2):
        relay.run_once()
    assert {one[0] for one in broker.bodies} >= begun


def test_a_message_is_recalled_until_a_relay_has_taken_it() -> None:
    with transaction.atomic():
        one, two = (publish("later", number, delay=600).message_id for number in range(2))
    with pytest.raises(TransactionUsageError), transaction.atomic():
        recall(one)
    assert recall(one).is_recalled
    rows_on("default").filter(message_id=two).update(taken_at=Now())
    with pytest.raises(NotSupported, match="recall of messages that it has stored"):
        recall(two)
    assert backlog("default").waiting == 1


def test_the_delivery_time_is_absolute_from_the_publish_call() -> None:
    with transaction.atomic():
        publish("later", 1, delay=timedelta(hours=1))
    row = rows_on("default").get()
    due = relay_rows.message_of("default", row).deliver_at
    assert due is not None and abs(due - row.born_at - timedelta(hours=1)) < timedelta(seconds=5)
