"""How messages reach a consumer: when they are due, when it is woken, which bodies are loaded, and by which plans."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from outbox.broker.consumer import dispatcher
from outbox.broker.consumer.fetch import Fetcher
from outbox.broker.consumer.owned_queue import ConsumingGroup, OwnedQueue
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups.leases import Lease
from outbox.broker.groups.offsets import Position
from outbox.message import Message
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench, Seen, encode
from tests.broker.groups.test_groups import message, messages, subscribe
from tests.support import eventually


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


def test_wake_up_is_by_announcement_not_by_polling(orders: ConsumptionBench) -> None:
    """Twenty messages one after the other, each sent when the last was handled: polling would take twenty seconds."""
    seen = Seen()
    with orders.sequencing(), orders.running((subscribe(), seen)):
        for n in range(20):
            orders.broker.send([message(n)])
            notify(Executor(orders.connection, "outbox"), Channel.DECIDED)
            eventually(lambda n=n: len(seen.ns) == n + 1, within_seconds=10 if n == 0 else 0.9)  # type: ignore[misc]


def test_without_listen_everything_works_by_polling(orders: ConsumptionBench) -> None:
    orders.database = BrokerDatabase(conninfo=orders.url, listen_conninfo="")
    seen = Seen()
    with orders.running((subscribe(), seen)):
        eventually(lambda: orders.members() == 1)
        orders.publish(messages(0, 5))
        eventually(lambda: len(seen.ns) == 5)


def test_fetching_uses_primary_keys_with_any_statistics(orders: ConsumptionBench) -> None:
    """With statistics of empty tables, a plan made from them would scan, and be slow for the first million messages."""
    orders.connection.execute("ANALYZE outbox.consume_queue; ANALYZE outbox.commit_log")
    orders.publish(messages(0, 3_000))
    executed: list[str] = []
    connection = orders.database.connect()
    group = ConsumingGroup(1, "g", False)
    subscribed = group.subscribe(subscribe(filter="sql: amount > 1"), Seen(), 1)
    fetcher = Fetcher([subscribed])
    statement = Statement("EXPLAIN (COSTS OFF) " + fetcher._statement.text)
    queue = OwnedQueue(Lease((1, 1), 1, 0.0, UUID(int=0)), group, subscribed, "orders/0", Position(0, 0))
    for prepare in (False, True):
        fetcher._statement = statement
        connection.execute(f"SET plan_cache_mode = {'force_generic_plan' if prepare else 'force_custom_plan'}".encode())
        executed += [row[0] for row in fetcher.fetch(Executor(connection, "outbox"), [(queue, 100)])]
    connection.close()
    plan = "\n".join(executed)
    assert "Seq Scan" not in plan and "Hash" not in plan and "Sort" not in plan, plan
    assert plan.count("Index Scan using consume_queue_pkey") == 2, plan
    assert plan.count("Index Scan using commit_log_pkey") == 2, plan


def test_messages_behind_many_others_are_fetched_without_a_wait(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fetched message fills the buffer, and no handler is called whose end would wake the process."""
    monkeypatch.setattr(dispatcher, "_LISTENING_POLL_SECONDS", 3600.0)
    orders.publish([Message(topic="orders", tag="other", body=encode({})) for _ in range(4_000)])
    orders.publish([Message(topic="orders", tag="wanted", body=encode({"n": 0}))])
    seen = Seen()
    with orders.running((subscribe(filter="wanted"), seen)):
        eventually(lambda: seen.ns == [0])


def has_come(seen: Seen, n: int) -> bool:
    return seen.ns[-1:] == [n]


def test_a_subscription_is_served_while_another_one_has_a_backlog(bench: ConsumptionBench) -> None:
    """All handlers of the flood wait, its lane is full, and thousands of its messages are not fetched yet."""
    go_on = threading.Event()
    started: list[None] = []

    def wait(_: Any) -> None:
        started.append(None)
        assert go_on.wait(60)

    bench.declare("flood")
    bench.declare("calm")
    bench.publish([Message(topic="flood", key=str(n % 100), body=encode({"n": n})) for n in range(5_000)])
    seen = Seen()
    flood = Subscription(topic="flood", group="flood", threads=2)
    with bench.running((flood, wait), (Subscription(topic="calm", group="calm"), seen)):
        try:
            eventually(lambda: len(started) == 2)
            for n in range(3):
                bench.publish([Message(topic="calm", body=encode({"n": n}))])
                eventually(partial(has_come, seen, n), what="the message of the other subscription")
            assert len(started) == 2
        finally:
            go_on.set()
        eventually(lambda: bench.lag("calm") == 0)
