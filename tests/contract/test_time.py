"""Times mean the same in every broker: a group starts by the time of queueing, a delay counts from storage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outbox.message import Delivery, Message
from outbox.subscription import Subscription
from outbox.transaction import Decision, EndTransaction, HalfTransaction
from tests.contract.benches import GROUP, Bench


def test_a_group_starts_by_the_time_of_queueing(bench: Bench) -> None:
    """A message decided after the start is delivered, even if it was stored long before."""
    late = HalfTransaction(producer_group=GROUP, messages=[Message(topic="orders", body=b'{"n":2}')])
    bench.broker.send_half(late)
    bench.publish([Message(topic="orders", body=b'{"n":1}')], commit=True)
    bench.visible("orders")
    start = datetime.now(UTC)
    bench.broker.end(
        [EndTransaction(transaction_id=late.transaction_id, decision=Decision.COMMIT, producer_group=GROUP)]
    )
    bench.visible("orders")
    received: list[Delivery] = []
    bench.subscribe(Subscription(group="points", topic="orders", start=start), received.append)
    bench.drain()
    assert [delivery.body["n"] for delivery in received] == [2]


def test_a_delay_counts_from_when_the_broker_stores_the_message(any_path: Bench) -> None:
    """Built long ago, or on a machine whose clock is wrong: the wait is the same."""
    built = datetime.now(UTC) - timedelta(days=1)
    delays = [timedelta(hours=1), timedelta(0)]
    sent = [Message(topic="later", body=b'{"n":1}', delay=delay, born_at=built) for delay in delays]
    any_path.publish(sent[:1], commit=True)
    any_path.publish([*sent[1:], Message(topic="later", body=b'{"n":2}')], commit=True)
    before = datetime.now(UTC)
    received: list[Delivery] = []
    any_path.subscribe(Subscription(group="points", topic="later"), received.append)
    any_path.drain()
    assert sorted(delivery.body["n"] for delivery in received) == [1, 2]
    (delayed,) = (delivery.message for delivery in received if delivery.body["n"] == 1)
    assert delayed.delay is None
    assert delayed.deliver_at is not None and before - timedelta(minutes=10) < delayed.deliver_at < before
