"""A consumer's connection: none is left open by a session that did not begin; and the statements on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from outbox.broker.consumer import coordinator, dispatcher
from outbox.broker.consumer.dispatcher import ConsumerSession
from outbox.broker.consumer.fetch import Fetcher, Row
from outbox.broker.consumer.owned_queue import OwnedQueue
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.message import Delivery
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench, Seen, keyed
from tests.support import eventually


def test_a_connection_on_which_listening_failed_is_closed(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise psycopg.OperationalError("too many notifications in the NOTIFY queue")

    monkeypatch.setattr(dispatcher, "listen", fails)
    # The error is kept, with everything its frames refer to: no connection is closed by losing its last reference.
    with pytest.raises(psycopg.OperationalError) as kept:
        ConsumerSession(bench.runtime((Subscription(topic="orders", group="g"), Seen()))._options)
    sessions = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'outbox-consumer' AND datname = current_database()"
    )
    eventually(lambda: bench.rows(sessions) == [(0,)])
    assert kept.value is not None


def test_of_many_queues_only_those_that_have_grown_are_read(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_LISTENING_POLL_SECONDS", 3600.0)
    asked: list[list[int]] = []
    fetch = Fetcher.fetch

    def fetch_and_note(self: Fetcher, run: Executor, wanted: Sequence[tuple[OwnedQueue, int]]) -> list[Row]:
        asked.append([queue.key[1] for queue, _ in wanted])
        return fetch(self, run, wanted)

    monkeypatch.setattr(Fetcher, "fetch", fetch_and_note)
    bench.declare("wide", queues=32)
    seen = Seen()
    with bench.running((Subscription(topic="wide", group="readers"), seen)):
        eventually(lambda: sum(map(len, asked)) >= 32, what="it has looked at all that it was given")
        for count in range(1, 8):
            del asked[:]
            bench.broker.send(keyed("wide", 1, 1, start=count))
            bench.tick()
            eventually(lambda count=count: len(seen.ns) == count)  # type: ignore[misc]
            # The first tick cannot know what was announced before.
            assert [len(queues) for queues in asked] == [32 if count == 1 else 1]


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_the_coordinator_connects_only_in_a_pass_that_outlasts_its_round(
    is_long: bool, bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long pass renews its leases on another session; every pass gives up its leases and leaves."""
    bench.declare("orders", queues=1)
    bench.publish(keyed("orders", 2, 2))
    names: list[str] = []
    real = BrokerDatabase.open

    def opening(self: BrokerDatabase, **options: Any) -> BrokerConnection:
        names.append(options.get("name", ""))
        return real(self, **options)

    monkeypatch.setattr(BrokerDatabase, "open", opening)
    ends = "SELECT expires_at FROM outbox.queue_lease WHERE owner IS NOT NULL AND expires_at > clock_timestamp()"
    seen: list[int] = []

    def handle(delivery: Delivery) -> None:
        if is_long:
            for _ in range(3):
                [before] = bench.rows(ends)
                eventually(lambda before=before: bench.rows(ends) not in ([], [before]), what="a renewal")  # type: ignore[misc]
        seen.append(delivery.body["n"])

    subscription = Subscription(topic="orders", group="g", threads=1)
    runtime = bench.runtime((subscription, handle), lease_seconds=1.5 if is_long else 600.0)
    monkeypatch.setattr(coordinator, "_LOOK_SECONDS", coordinator._LOOK_SECONDS if is_long else 600.0)
    assert runtime.run_once().handled == len(seen) == 2
    assert ("outbox-coordinator" in names) == is_long
    assert bench.rows(ends) == bench.rows("SELECT * FROM outbox.consumer") == []
