"""A consumer's connection: none is left open by a session that did not begin; and the statements on it."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest

from outbox.broker.consumer import runtime
from outbox.broker.consumer.fetch import Fetcher, Row
from outbox.broker.consumer.owned_queue import OwnedQueue
from outbox.broker.consumer.runtime import ConsumerSession
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.codec import Codecs
from outbox.ports import call_handler
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench, Seen, keyed
from tests.support import eventually


def test_a_connection_on_which_listening_failed_is_closed(
    database: BrokerDatabase, connection: BrokerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise psycopg.OperationalError("too many notifications in the NOTIFY queue")

    monkeypatch.setattr(runtime, "listen", fails)
    # The error is kept, with everything its frames refer to: no connection is closed by losing its last reference.
    with pytest.raises(psycopg.OperationalError) as kept:
        ConsumerSession(
            database,
            lambda run, instance: [],
            invoker=call_handler,
            codecs=Codecs(),
            lease_seconds=10,
            note=FailureNote(database, ProcessPart.CONSUMING),
        )
    sessions = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'outbox-consumer' AND datname = current_database()"
    )
    eventually(lambda: connection.execute(sessions).fetchall() == [(0,)])
    assert kept.value is not None


def test_of_many_queues_only_those_that_have_grown_are_read(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_LISTENING_POLL_SECONDS", 3600.0)
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
