"""Broadcast groups: every instance gets every message."""

from __future__ import annotations

import pytest

from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Start
from tests.broker.bench import ConsumptionBench, Seen
from tests.broker.groups.test_groups import message, messages, subscribe
from tests.support import eventually


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


def test_broadcast_gives_every_instance_all_messages(orders: ConsumptionBench) -> None:
    one, two = Seen(), Seen()
    subscription = subscribe(broadcast=True, start=Start.LATEST)
    orders.publish(messages(0, 5))
    with orders.sequencing(), orders.running((subscription, one)), orders.running((subscription, two)):
        eventually(lambda: orders.members() == 2)
        # Both have taken their position by the time their first message arrives.
        eventually(lambda: orders.broker.send([message(-1)]) and -1 in one.ns and -1 in two.ns)
        orders.broker.send(messages(5, 20))
        eventually(lambda: sorted({*one.ns}) == sorted({*two.ns}) == [-1, *range(5, 20)])


def test_broadcast_retries_in_place_and_gives_up(orders: ConsumptionBench) -> None:
    attempts: list[int] = []
    done = Seen()

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 1:
            attempts.append(delivery.attempt)
            raise ValueError
        done(delivery)

    policy = RetryPolicy(delays_seconds=[0.01], max_attempts=3)
    orders.publish(messages(0, 3))
    with orders.running((subscribe(broadcast=True, retry=policy), handle)):
        eventually(lambda: len(attempts) == 3 and sorted(done.ns) == [0, 2])
    assert attempts == [1, 2, 3]
    assert orders.retrying() == 0
