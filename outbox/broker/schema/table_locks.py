"""Lock all tables of a schema change at once, without taking part in a deadlock.

A change of the tables needs ACCESS EXCLUSIVE locks while other transactions run. Two rules protect these:

- One request takes all locks of a change, before it does anything else. It waits only for the first lock, that of the
  busiest table, and takes the others with NOWAIT.
- While it waits, every later transaction that uses the first table waits behind it. So the first attempts do not wait,
  later ones wait for some milliseconds, then longer, and the pause after each attempt is longer than its wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from psycopg import sql

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# A change locks these tables first, in this order, and then all other tables by name.
_BUSIEST: Final = (
    "commit_log",
    "op_log",
    "consume_queue",
    "tick",
    "consumer_offset",
    "queue_lease",
    "topic",
    "queue",
    "subscription",
    "consumer_group",
)

# Other locks that a change needs (rows of the catalogue, tables that a view reads) are normally free.
_REST_MILLISECONDS: Final = 100


def in_order(tables: Iterable[str]) -> list[str]:
    places = {name: place for place, name in enumerate(_BUSIEST)}
    return sorted(tables, key=lambda name: (places.get(name, len(places)), name))


def take(run: Executor, tables: Iterable[str], *, wait_seconds: float) -> None:
    """Lock the tables for this transaction, which must hold no table lock yet.

    It waits up to `wait_seconds` for the first table. Raises LockNotAvailable if another transaction uses one of them.
    """
    first, *others = in_order(tables)
    statements = [sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{max(1, round(wait_seconds * 1000))}ms"))]
    statements.append(_lock(run.schema, [first], waits=wait_seconds > 0))
    if others:
        statements.append(_lock(run.schema, others, waits=False))
    statements.append(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{_REST_MILLISECONDS}ms")))
    # One request: between two, a transaction that has waited for the first table could lock another one.
    run.connection.execute(sql.SQL("; ").join(statements))


def _lock(schema: str, tables: Sequence[str], *, waits: bool) -> sql.Composed:
    names = sql.SQL(", ").join(sql.Identifier(schema, name) for name in tables)
    statement = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(names)
    return statement if waits else statement + sql.SQL(" NOWAIT")


_HOLDERS: Final = Statement("""
SELECT concat(
    coalesce('session ' || used.pid, 'prepared transaction ' || quote_literal(prepared.gid), 'prepared transaction'),
    ' (' || nullif(activity.application_name, '') || ')', ': ',
    CASE WHEN used.pid IS NULL THEN 'prepared'
         ELSE coalesce(activity.state, activity.backend_type, 'not visible') END,
    ', open for ' || round(age_seconds::numeric, 1) || ' s',
    ', its last statement began at ' || to_char(activity.query_start, 'YYYY-MM-DD HH24:MI:SSTZHTZM'),
    ', uses ' || array_to_string(used.tables, ', '))
FROM (
    SELECT lock.pid, lock.virtualtransaction, array_agg(DISTINCT relname::text ORDER BY relname::text) AS tables
    FROM pg_locks lock JOIN pg_class ON pg_class.oid = lock.relation
    WHERE lock.granted AND lock.pid IS DISTINCT FROM pg_backend_pid()
      AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND relnamespace = to_regnamespace(%(schema)s) AND relname = ANY(%(tables)s::text[])
    GROUP BY lock.pid, lock.virtualtransaction
) AS used
LEFT JOIN pg_stat_activity activity ON activity.pid = used.pid
LEFT JOIN pg_locks own ON used.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid'
                      AND own.virtualtransaction = used.virtualtransaction
LEFT JOIN pg_prepared_xacts prepared ON prepared.transaction = own.transactionid
CROSS JOIN LATERAL extract(epoch FROM clock_timestamp() - coalesce(activity.xact_start, prepared.prepared))
    AS age_seconds
-- An idle session has ended its transaction since its locks were read.
WHERE activity.state IS DISTINCT FROM 'idle' AND (age_seconds IS NULL OR age_seconds >= %(least)s)
ORDER BY age_seconds DESC NULLS LAST
""")


def holders(run: Executor, tables: Iterable[str], *, at_least_seconds: float = 0.0) -> list[str]:
    """Return a text about each transaction of at least `at_least_seconds` that uses these tables, the oldest first.

    PostgreSQL shows only some of the facts if the session belongs to another role.
    """
    values = {"schema": run.schema, "tables": arrays.texts(list(tables)), "least": at_least_seconds}
    return [text for (text,) in run.rows(_HOLDERS, values)]
