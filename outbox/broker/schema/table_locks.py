"""Lock all tables of a schema change at once, without taking part in a deadlock.

A change of the tables needs ACCESS EXCLUSIVE locks while other transactions run. Two rules protect the other
transactions:

- One request to the server takes all locks of a change, before the change does anything else. The transaction of the
  change waits only for the first lock, and holds no other lock during this wait. The request takes all locks after the
  first lock with NOWAIT.
- While a change waits for the lock of the first table, every later transaction that uses the first table waits behind
  the change. So the first attempts to lock the tables do not wait at all. Later attempts wait for the first lock, at
  the beginning for some milliseconds, then longer. The pause after each attempt is longer than the wait of the attempt.

All changes lock the tables in the same order, the busiest table first. So a change waits only for the busiest table. An
attempt without a wait would hardly ever find the busiest table free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
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

    The function waits up to `wait_seconds` for the first table; with 0 it does not wait. Raises LockNotAvailable if
    another transaction uses one of the tables; then the caller must roll the transaction back.
    """
    first, *others = in_order(tables)
    statements = [sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{max(1, round(wait_seconds * 1000))}ms"))]
    statements.append(_lock(run.schema, [first], waits=wait_seconds > 0))
    if others:
        statements.append(_lock(run.schema, others, waits=False))
    statements.append(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{_REST_MILLISECONDS}ms")))
    # One request takes all locks. Otherwise, between two requests, a transaction that has waited for the first table
    # could lock another table.
    run.connection.execute(sql.SQL("; ").join(statements))


def _lock(schema: str, tables: Sequence[str], *, waits: bool) -> sql.Composed:
    names = sql.SQL(", ").join(sql.Identifier(schema, name) for name in tables)
    statement = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(names)
    return statement if waits else statement + sql.SQL(" NOWAIT")


@dataclass(frozen=True, slots=True)
class Holder:
    """A transaction that uses one of the tables.

    PostgreSQL shows only some of these fields if the session belongs to another role.
    """

    session: str
    application: str | None
    state: str
    age_seconds: float | None
    query_start: datetime | None
    tables: Sequence[str]

    def __str__(self) -> str:
        age = "" if self.age_seconds is None else f", open for {self.age_seconds:.1f} s"
        began = (
            "" if self.query_start is None else f", its last statement began at {self.query_start:%Y-%m-%d %H:%M:%S%z}"
        )
        application = f" ({self.application})" if self.application else ""
        return f"{self.session}{application}: {self.state}{age}{began}, uses {', '.join(self.tables)}"


_HOLDERS: Final = Statement("""
SELECT coalesce('session ' || used.pid, 'prepared transaction ' || quote_literal(prepared.gid), 'prepared transaction')
           AS session,
       activity.application_name AS application,
       CASE WHEN used.pid IS NULL THEN 'prepared'
            ELSE coalesce(activity.state, activity.backend_type, 'not visible') END AS state,
       extract(epoch FROM clock_timestamp() - coalesce(activity.xact_start, prepared.prepared))::double precision
           AS age_seconds,
       activity.query_start,
       used.tables
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
-- The session has ended since its locks were read.
WHERE activity.state IS DISTINCT FROM 'idle'
ORDER BY age_seconds DESC NULLS LAST
""")


def holders(run: Executor, tables: Iterable[str], *, at_least_seconds: float = 0.0) -> list[Holder]:
    """Return the transactions of at least `at_least_seconds` that use these tables now, the oldest first."""
    values = {"schema": run.schema, "tables": arrays.texts(list(tables))}
    found = run.objects(Holder, _HOLDERS, values)
    return [one for one in found if one.age_seconds is None or one.age_seconds >= at_least_seconds]
