"""Consumers read what is committed, wherever they start to read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outbox.broker.operations.changes import reset
from outbox.message import Delivery, Message
from outbox.subscription import Start, Subscription
from outbox.topic import MessageType
from outbox.transaction import Decision, EndTransaction, HalfTransaction
from tests.broker.bench import ConsumptionBench, encode

TYPES = frozenset({MessageType.NORMAL, MessageType.TRANSACTION})
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def message(n: int) -> Message:
    return Message(topic="orders", body=encode({"n": n}))


@pytest.mark.parametrize("target", [Start.LATEST, Start.EARLIEST, LONG_AGO, 10_000], ids=str)
def test_undecided_messages_stay_unseen_after_a_seek(bench: ConsumptionBench, target: Start | datetime | int) -> None:
    """To the end, to the beginning, by time or by offset; decided after the seek they are delivered, once."""
    bench.declare("orders", queues=1, types=TYPES)
    subscription = Subscription(group="g", topic="orders", start=Start.EARLIEST)
    seen: list[int] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.body["n"])

    bench.publish([message(n) for n in range(5)])
    half = HalfTransaction(producer_group="shop", messages=[message(100), message(101)])
    dropped = HalfTransaction(producer_group="shop", messages=[message(200)])
    for one in (half, dropped):
        bench.broker.send_half(one)
    bench.run_until_idle(subscription, handle)
    assert sorted(seen) == list(range(5))
    reset(bench.run, "g", "orders", target, reprocess=True)
    bench.run_until_idle(subscription, handle)
    assert max(seen) < 100
    bench.broker.end([end(half, Decision.COMMIT), end(dropped, Decision.ROLLBACK)])
    bench.sequence()
    bench.run_until_idle(subscription, handle)
    assert sorted(n for n in seen if n >= 100) == [100, 101]


def end(half: HalfTransaction, decision: Decision) -> EndTransaction:
    return EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group="shop")
