"""A broker that tests have emptied is like a new one."""

from __future__ import annotations

import psycopg

from outbox.broker.database.executor import Executor
from outbox.broker.operations import deletion

# Their rows describe the process, and no message changes them; ticks continue to count.
KEPT = {"broker", "schema_version", "resync", "half_scan", "tick", "publisher"}


def test_no_table_is_forgotten(broker_url: str) -> None:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        files = _files(connection)
        assert files.keys() >= KEPT | {"commit_log", "consumer_offset"}
        deletion.empty(Executor(connection, "outbox"))
        # TRUNCATE gives a table a new file.
        assert {name for name, file in _files(connection).items() if file == files[name]} == KEPT


def _files(connection: psycopg.Connection[tuple[str, int]]) -> dict[str, int]:
    rows = connection.execute(
        "SELECT relname::text, relfilenode FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'"
    )
    return dict(rows.fetchall())
