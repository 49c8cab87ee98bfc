"""A leading consumer process fetches in the round trip of its tick."""

from __future__ import annotations

import select
import threading
import time
from typing import Any
from uuid import UUID

import pytest

from outbox.broker.consumer import dispatcher
from outbox.broker.consumer.dispatcher import FetchAhead
from outbox.broker.consumer.fetch import Fetcher, Row
from outbox.broker.consumer.owned_queue import ConsumingGroup, OwnedQueue, Phase
from outbox.broker.database.sender import RoundTrip
from outbox.broker.database.statement import Statement
from outbox.broker.groups.leases import Lease
from outbox.broker.groups.offsets import Position
from outbox.broker.leading import LeaderSettings, LeadingConsumer
from outbox.message import Message
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench, Seen, encode, keyed
from tests.broker.leaders import led_by_consumer
from tests.support import eventually


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> LeaderSettings:
    """Nothing is found by polling."""
    monkeypatch.setattr(dispatcher, "_LISTENING_POLL_SECONDS", 3600.0)
    return LeaderSettings(lease_term_seconds=3600.0, poll_seconds=3600.0)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each fetch outside of a tick has found."""
    found: list[int] = []
    fetch = Fetcher.fetch

    def noted(self: Fetcher, *arguments: Any) -> list[Row]:
        rows = fetch(self, *arguments)
        found.append(len(rows))
        return rows

    monkeypatch.setattr(Fetcher, "fetch", noted)
    return found


def ahead_of(queues: list[OwnedQueue]) -> FetchAhead:
    subscribed = [queue.subscribed for queue in queues if queue.subscribed is not None]
    return FetchAhead(Fetcher(subscribed), {queue.key: queue for queue in queues})


def owned(bench: ConsumptionBench) -> list[OwnedQueue]:
    """The queues of the topic `orders`, as if this process had acquired them."""
    group = ConsumingGroup(1, "readers", False)
    subscribed = group.subscribe(Subscription(topic="orders", group="readers"), Seen(), 1)
    rows = bench.rows("SELECT queue_id FROM outbox.queue ORDER BY queue_id")
    return [
        OwnedQueue(Lease((1, queue_id), 1, time.monotonic() + 60, UUID(int=0)), group, subscribed, "q", Position(0, 0))
        for (queue_id,) in rows
    ]


def fetch_ahead(bench: ConsumptionBench, ahead: FetchAhead) -> None:
    trip = RoundTrip(bench.connection, "outbox", prepared={})
    sent = ahead.send(trip)
    assert sent is not None
    ahead.answered(trip.finish()[sent])


# Since the fetch: the queue was lost, stopped, drained, fetched again, filled or bounded, or its group was paused.
CHANGES = (
    ("phase", Phase.LOST),
    ("phase", Phase.STOPPED),
    ("phase", Phase.DRAINING),
    ("fetch_from", 7),
    ("buffered", 10_000),
    ("end", 0),
    ("group.paused", True),
)


def test_rows_of_a_queue_that_has_changed_are_ignored(bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.declare("orders", queues=1)
    bench.publish(keyed("orders", 3, 1))
    [queue] = owned(bench)
    ahead = ahead_of([queue])
    for what, value in CHANGES:
        fetch_ahead(bench, ahead)
        *path, name = what.split(".")
        with monkeypatch.context() as changed:
            changed.setattr(queue.group if path else queue, name, value)
            assert list(ahead.take()) == [], what
    fetch_ahead(bench, ahead)
    assert len(list(ahead.take())) == 1, "unchanged"


def test_rows_are_used_once_and_in_order(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=4)
    bench.publish(keyed("orders", 30, 10))
    queues = owned(bench)
    ahead = ahead_of(queues)
    fetch_ahead(bench, ahead)
    found = {queue.key: [row[1] for row in rows] for queue, _, rows in ahead.take()}
    assert sum(map(len, found.values())) == 30
    assert all(offsets == list(range(len(offsets))) for offsets in found.values())
    assert list(ahead.take()) == []


def test_many_queues_are_not_fetched_ahead(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=dispatcher._MOST_QUEUES_AHEAD + 1)
    trip = RoundTrip(bench.connection, "outbox", prepared={})
    assert ahead_of(owned(bench)).send(trip) is None
    assert ahead_of([]).send(trip) is None


def test_filters_and_large_bodies(bench: ConsumptionBench, patient: LeaderSettings, fetches: list[int]) -> None:
    bench.declare("orders")
    sizes: list[int] = []
    subscription = Subscription(topic="orders", group="readers", filter="a")
    leading = LeadingConsumer(bench.database, settings=patient)
    with bench.running((subscription, lambda one: sizes.append(len(one.body))), session_task=leading):
        for count, size in enumerate((1, 2, 3, 4, 5, 10, 30_000, 300_000, 20), start=1):
            if size == 10:
                # The process owns all queues by now.
                fetches.clear()
            bench.broker.send([Message(topic="orders", tag=tag, body=encode("x" * size)) for tag in ("a", "b")])
            eventually(lambda count=count: len(sizes) == count)  # type: ignore[misc]
    assert sorted(sizes) == [1, 2, 3, 4, 5, 10, 20, 30_000, 300_000]
    assert sum(fetches) == 0, "all entries were fetched ahead"


def test_entries_that_another_leader_appends_meanwhile_are_fetched(
    bench: ConsumptionBench, patient: LeaderSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their notification arrives together with the notification of this process's own tick."""
    bench.declare("orders", queues=1)
    seen, send, answered, is_armed = Seen(), FetchAhead.send, FetchAhead.answered, threading.Event()
    trips: list[RoundTrip] = []

    def sent(self: FetchAhead, trip: RoundTrip) -> int | None:
        trips.append(trip)
        return send(self, trip)

    def answered_late(self: FetchAhead, rows: list[Row]) -> None:
        answered(self, rows)
        if rows and is_armed.is_set():
            is_armed.clear()
            # Otherwise, the next tick of this process collides, and announces the entries once more.
            trips[-1]._connection.execute("UNLISTEN outbox_decided")
            bench.publish([Message(topic="orders", body=encode({"n": 100}))])
            eventually(lambda: select.select([trips[-1]._connection], [], [], 0)[0], what="the notification")

    monkeypatch.setattr(FetchAhead, "send", sent)
    monkeypatch.setattr(FetchAhead, "answered", answered_late)
    leading = LeadingConsumer(bench.database, settings=patient)
    with bench.running((Subscription(topic="orders", group="readers"), seen), session_task=leading):
        # From then on, the process owns the queue.
        bench.broker.send(keyed("orders", 1, 1))
        eventually(lambda: seen.ns == [0])
        is_armed.set()
        bench.broker.send(keyed("orders", 1, 1, start=1))
        eventually(lambda: sorted(seen.ns) == [0, 1, 100])
        assert not is_armed.is_set()


def test_messages_arrive_also_if_the_fetch_fails(
    bench: ConsumptionBench, patient: LeaderSettings, monkeypatch: pytest.MonkeyPatch, fetches: list[int]
) -> None:
    def broken(self: FetchAhead, trip: RoundTrip) -> int | None:
        return trip.send_adapted(Statement("SELECT 1 / 0"), {})

    monkeypatch.setattr(FetchAhead, "send", broken)
    bench.declare("orders")
    seen = Seen()
    leading = LeadingConsumer(bench.database, settings=patient)
    with bench.running((Subscription(topic="orders", group="readers"), seen), session_task=leading):
        for count in range(1, 6):
            bench.broker.send(keyed("orders", 1, 1, start=count))
            eventually(lambda count=count: len(seen.ns) == count)  # type: ignore[misc]
        assert led_by_consumer(bench)
    assert sum(fetches) == 5, "all entries were fetched after the tick"
