"""A key with far more messages than the others: the process drops the rows of its messages and reads them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outbox.broker.consumer import dispatcher, fetch
from outbox.contrib.limits import Limits
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.time_limit import TIMEOUT_HEADER
from tests.broker.bench import ConsumptionBench, encode
from tests.support import eventually

FLOOD = 2_500


class Handled:
    """Records the messages in the order of their calls. The handlers of the flood wait while `go_on` is not set."""

    def __init__(self, fails: Callable[[Delivery], bool] = lambda delivery: False) -> None:
        self._lock = threading.Lock()
        self._fails = fails
        self.go_on = threading.Event()
        self.go_on.set()
        self.calls: list[tuple[str, int]] = []

    def __call__(self, delivery: Delivery) -> None:
        assert delivery.key != "flood" or self.go_on.wait(60)
        if self._fails(delivery):
            raise ValueError(f"attempt {delivery.attempt} of {delivery.message_id}")
        with self._lock:
            self.calls.append((delivery.key, delivery.body["n"]))

    def of(self, key: str) -> list[int]:
        """The numbers of the messages of a key, each at its first call."""
        with self._lock:
            return list(dict.fromkeys(n for name, n in self.calls if name == key))


def limited(**options: Any) -> Subscription:
    values = {"group": "g", "topic": "orders", "threads": 4, "retry": RetryPolicy(delays_seconds=[0.05]), **options}
    return Subscription(options=[Limits(per_key=1)], **values)


def flood(count: int = FLOOD, size: int = 0, **fields: Any) -> list[Message]:
    filler = "x" * size
    return [
        Message(topic="orders", key="flood", body=encode({"n": n, "filler": filler}), **fields) for n in range(count)
    ]


def one(key: str, n: int = 0) -> Message:
    return Message(topic="orders", key=key, body=encode({"n": n}))


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


@contextmanager
def counted_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each statement has loaded again."""
    loads: list[int] = []

    def counted(run: Any, places: Any) -> Any:
        loads.append(len(places))
        return fetch.load(run, places)

    monkeypatch.setattr(dispatcher, "load", counted)
    yield loads


@pytest.mark.slow
def test_messages_of_other_keys_overtake_the_flood_and_nothing_is_lost(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = Handled()
    orders.publish([*flood(), *(one(f"other {n}") for n in range(50))])
    with counted_loads(monkeypatch) as loads, orders.running((limited(), handled)):
        eventually(lambda: handled.of("flood"))
        handled.go_on.clear()
        try:
            # All messages of the flood are before these messages in the queue, and its present call does not end.
            for n in range(3):
                orders.publish([one("late", n)])
                eventually(lambda n=n: n in handled.of("late"))  # type: ignore[misc]
            eventually(lambda: sum(key != "flood" for key, _ in handled.calls) == 53)
            assert len(handled.of("flood")) < FLOOD
        finally:
            handled.go_on.set()
        eventually(lambda: len(handled.of("flood")) == FLOOD, within_seconds=60)
        eventually(lambda: orders.lag("g") == 0)
    assert handled.of("flood") == list(range(FLOOD))
    assert len(handled.calls) == len(set(handled.calls)) == FLOOD + 53
    # Each row was dropped and loaded at most once again, several rows per statement.
    assert FLOOD // 2 < sum(loads) <= FLOOD
    assert len(loads) < FLOOD / 5
    orders.assert_conserved("g")


@pytest.mark.parametrize("size", [0, 100_000], ids=["small", "large"])
def test_failed_messages_of_the_flood_come_again(orders: ConsumptionBench, size: int) -> None:
    """Large bodies are not in memory in any case."""
    handled = Handled(
        lambda delivery: delivery.key == "flood" and delivery.attempt == 1 and delivery.body["n"] % 7 == 0
    )
    orders.publish([*flood(40, size), one("other")])
    with orders.sequencing(), orders.running((limited(), handled)):
        eventually(lambda: len(handled.calls) == 41, within_seconds=60)
        eventually(lambda: orders.lag("g") == 0)
    assert sorted(handled.of("flood")) == list(range(40))
    orders.assert_conserved("g")


def test_a_lost_connection_while_rows_are_loaded_loses_nothing(orders: ConsumptionBench) -> None:
    handled = Handled()
    orders.publish(flood())
    with orders.running((limited(), handled)):
        for part in range(1, 4):
            eventually(lambda part=part: len(handled.of("flood")) > 300 * part, within_seconds=60)  # type: ignore[misc]
            orders.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%%' AND %s",
                True,
            )
        eventually(lambda: len(handled.of("flood")) == FLOOD, within_seconds=60)
        eventually(lambda: orders.lag("g") == 0)
    assert handled.of("flood") == list(range(FLOOD))
    orders.assert_conserved("g")


def test_dropped_rows_that_retention_removes_are_expired(orders: ConsumptionBench) -> None:
    handled = Handled()
    handled.go_on.clear()
    orders.publish([*flood(500), one("other")])
    with orders.running((limited(), handled)):
        try:
            eventually(lambda: orders.rows("SELECT 1 FROM outbox.slot"))
            loaded = 16 + 64
            orders.rows(
                "WITH gone AS (DELETE FROM outbox.commit_log WHERE convert_from(body, 'UTF8')::json ->> 'n' IN"
                " (SELECT number::text FROM generate_series(%s::integer, 499) AS number) AND key = 'flood' RETURNING 1)"
                " SELECT count(*) FROM gone",
                loaded,
            )
        finally:
            handled.go_on.set()
        eventually(lambda: orders.lag("g") == 0)
    assert handled.of("flood")[:16] == list(range(16))
    assert handled.of("other") == [0]
    [(handled_count, expired)] = orders.rows("SELECT handled, expired FROM outbox.offset_v1 WHERE topic = 'orders'")
    assert handled_count == len(handled.calls)
    assert handled_count + expired == 501
    assert expired >= 400
    orders.assert_conserved("g")


def test_dropped_messages_past_their_time_limit_time_out(orders: ConsumptionBench) -> None:
    handled = Handled()
    handled.go_on.clear()
    orders.publish([*flood(300, headers={TIMEOUT_HEADER: "2"}), one("flood", 300)])
    with orders.running((limited(), handled)):
        eventually(lambda: orders.rows("SELECT 1 FROM outbox.slot"))
        began = time.monotonic()
        eventually(lambda: time.monotonic() > began + 2.1)
        handled.go_on.set()
        eventually(lambda: orders.lag("g") == 0)
    # The first call was running already.
    assert handled.of("flood") in ([0, 300], [300])
    assert orders.rows("SELECT count(*) >= 299 FROM outbox.timed_out") == [(True,)]
    orders.assert_conserved("g")
