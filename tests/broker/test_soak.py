"""Long forms, behind `make faults`."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable, Sequence
from uuid import UUID

import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.operations.audit import count_messages
from outbox.broker.postgres import PostgresBroker
from outbox.checkback import CheckBack
from outbox.errors import BrokerError
from outbox.transaction import Answer, Check, Decision
from tests.broker.support import assert_gapless, drain, end, half, message, new_sequencer, process, queued_ids
from tests.support import eventually

pytestmark = pytest.mark.soak


class _AlwaysCommitted:
    def check_local_transactions(self, checks: Sequence[Check]) -> Iterable[Answer]:
        return [Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT) for check in checks]


@pytest.mark.timeout(600)
def test_a_million_half_messages_one_percent_undecided(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    for _ in range(200):
        connection.execute(
            "INSERT INTO outbox.commit_log (born_at, stored_at, transaction_id, message_id, topic_id, half,"
            " producer_group, key, tag, content_type, body)"
            " SELECT now(), now() - interval '1 minute', id, id,"
            " (SELECT topic_id FROM outbox.topic WHERE name = 'orders'), true, 'shop', '', '', 'application/json', 'x'"
            " FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, 5000)) AS ids"
        )
    for first in range(0, 1_000_000, 10_000):
        connection.execute(
            "INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)"
            " SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM outbox.commit_log"
            " WHERE log_id % 100 <> 0 AND log_id > %s AND log_id <= %s".replace("% 100", "%% 100"),
            [first, first + 10_000],
        )
    started = time.monotonic()
    counts = CheckBack(broker, "shop", _AlwaysCommitted()).run_once(max_batches=1000)
    seconds = time.monotonic() - started
    assert (counts.claimed, counts.committed) == (10_000, 10_000)
    drain(new_sequencer(database), connection)
    assert connection.execute("SELECT count(*) FROM outbox.consume_queue").fetchone() == (1_000_000,)
    print(f"{seconds:.1f} s")


def test_pg_terminate_backend_twice_a_second(database: BrokerDatabase, connection: BrokerConnection) -> None:
    ends = threading.Event()
    sent: set[UUID] = set()
    unsure: set[UUID] = set()
    lock = threading.Lock()

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        with contextlib.closing(PostgresBroker(database)) as broker:
            while not ends.is_set():
                one = half(message(), message("ordered", key=rng.choice("abc")))
                ids = {each.message_id for each in one.messages}
                try:
                    broker.send_half(one, timeout_seconds=5)
                    decision = rng.choice([Decision.COMMIT, Decision.ROLLBACK])
                    broker.end([end(one.transaction_id, decision)], timeout_seconds=5)
                except BrokerError:
                    with lock:
                        unsure.update(ids)
                    continue
                if decision is Decision.COMMIT:
                    with lock:
                        sent.update(ids)

    producers = [threading.Thread(target=produce, args=(seed,)) for seed in range(4)]
    with process(database):
        for thread in producers:
            thread.start()
        for _ in range(60):
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            ends.wait(0.5)
        ends.set()
        for thread in producers:
            thread.join()
        with contextlib.closing(PostgresBroker(database)) as broker:
            undecided = connection.execute(
                "SELECT transaction_id FROM outbox.commit_log l WHERE half AND message_id = transaction_id"
                " AND NOT EXISTS (SELECT FROM outbox.op_log o WHERE o.transaction_id = l.transaction_id)"
            ).fetchall()
            broker.end([end(row[0], Decision.ROLLBACK) for row in undecided])
        eventually(lambda: sent <= set(queued_ids(connection)), within_seconds=30)
    found = queued_ids(connection)
    assert len(found) == len(set(found))
    assert set(found) <= sent | unsure
    assert_gapless(connection)
    assert count_messages(Executor(connection, "outbox")).differences() == []
