"""The sequencer under concurrent writers; the test also shows that the two obvious sequencers lose messages."""

from __future__ import annotations

import contextlib

import psycopg
import pytest
from psycopg.rows import TupleRow

from outbox.broker.database.connection import BrokerDatabase
from tests.broker.sequencer.writers import Pass, judge
from tests.broker.support import new_sequencer


def _leader(database: BrokerDatabase, *, batch: int) -> Pass:
    sequencer = new_sequencer(database, batch=batch)

    def run_once(connection: psycopg.Connection[TupleRow]) -> bool:
        counts = sequencer.run_once(connection)
        return counts.ticked or counts.more

    return run_once


_APPEND = """
WITH fresh AS (
    SELECT unnest(log_ids) AS log_id FROM outbox.op_log WHERE decision = 'C' AND {new}
), placed AS (
    SELECT log_id, queue_id FROM fresh JOIN outbox.commit_log USING (log_id)
    JOIN outbox.topic USING (topic_id)
    JOIN outbox.queue USING (topic_id, layout)
    WHERE number = coalesce(shard, log_id) % queue_count
)
INSERT INTO outbox.consume_queue (queue_id, queue_offset, log_id, attempt)
SELECT queue_id,
       coalesce((SELECT max(queue_offset) + 1 FROM outbox.consume_queue e WHERE e.queue_id = placed.queue_id), 0)
       + row_number() OVER (PARTITION BY queue_id ORDER BY log_id) - 1, log_id, 0
FROM placed RETURNING log_id
"""


class IdCursor:
    """Broken on purpose: reads what has a greater id than the last one it read."""

    def __init__(self) -> None:
        self._read_up_to = 0

    def __call__(self, connection: psycopg.Connection[TupleRow]) -> bool:
        new = f"log_ids[1] > {self._read_up_to}"
        rows = connection.execute(_APPEND.replace("{new}", new)).fetchall()
        if rows:
            self._read_up_to = max(row[0] for row in rows)
        return bool(rows)


class XminHorizon:
    """Broken on purpose: reads up to the oldest running transaction, so that none can commit behind it."""

    def __init__(self) -> None:
        self._read_up_to = 0

    def __call__(self, connection: psycopg.Connection[TupleRow]) -> bool:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            row = connection.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint").fetchone()
            assert row is not None
            new = f"xid >= '{self._read_up_to}'::xid8 AND xid < '{row[0]}'::xid8"
            rows = connection.execute(_APPEND.replace("{new}", new)).fetchall()
        self._read_up_to = row[0]
        return bool(rows)


@pytest.mark.parametrize("batch", [20_000, 7])
def test_eight_writers_and_two_leaders(database: BrokerDatabase, batch: int) -> None:
    verdict = judge(database, [_leader(database, batch=batch), _leader(database, batch=batch)])
    assert verdict.is_clean, verdict
    with contextlib.closing(database.connect()) as connection:
        row = connection.execute("SELECT count(*), max(tick_id) + 1 FROM outbox.tick").fetchone()
        assert row is not None and row[0] == row[1]


@pytest.mark.soak
def test_control_an_id_cursor_loses_messages(database: BrokerDatabase) -> None:
    verdict = judge(database, [IdCursor()])
    assert verdict.lost and not verdict.doubled


@pytest.mark.soak
def test_control_an_xmin_horizon_stalls_behind_an_open_transaction(database: BrokerDatabase) -> None:
    verdict = judge(database, [XminHorizon()])
    assert verdict.stalled and not verdict.lost
