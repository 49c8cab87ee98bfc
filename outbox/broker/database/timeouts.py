"""Lift the timeouts that a role or database sets, and set the broker's own limits.

With the timeouts that are meant for applications, the broker could never finish a long backlog. Behind a pooler, they
are lifted for one transaction, because a pooler passes a setting of the session on to other clients. They still apply
to a send, which is part of a request of the application.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, LiteralString

from outbox.broker.database.connection import BrokerConnection, Connection
from outbox.broker.database.executor import cursor_on
from outbox.broker.database.statement import Statement

# PostgreSQL 17 introduced transaction_timeout.
_LIFT: Final = """
SELECT set_config(name, '0', $1)
FROM unnest(ARRAY['statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout',
                  'idle_session_timeout']) AS name
WHERE current_setting(name, true) IS NOT NULL
"""
_LIFT_WHERE_DIRECT: Final = f"{_LIFT} AND pg_backend_pid() = $2"
_LIMIT: Final = "SELECT set_config('lock_timeout', '1s', true)"
_LIMIT_SESSION: Final = "SELECT set_config('lock_timeout', '10s', false)"
# For the transaction of a tick behind a pooler. Its wait for a lock is as limited as in a session.
LIFT: Final = Statement(
    _LIFT.replace("'0'", "CASE name WHEN 'lock_timeout' THEN '10s' ELSE '0' END").replace("$1", "%(local)s")
)


def lift_for_session(connection: Connection) -> None:
    """Lift the timeouts of a direct connection. Behind a pooler, it would lift those of other clients, too."""
    _lift(connection, local=False)


def lift_where_direct(connection: Connection) -> bool:
    """Lift the timeouts of the session if there is no pooler; else the caller opens each transaction with `lifted`.

    It asks the server, because with LISTEN_URL = "" a connection may be direct in spite of the settings.
    """
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT_WHERE_DIRECT + _kept(connection), [False, connection.info.backend_pid])
        return cursor.rowcount > 0


def limit_locks_where_direct(connection: BrokerConnection) -> None:
    """Do the same as `lift_where_direct`, but make each statement of a direct connection raise LockNotAvailable after
    ten seconds of waiting for a lock.

    The functions that lift timeouts keep this limit. Without it, a loop that waits for a locked table would write
    neither a log line nor a heartbeat. With it, the process logs the error and connects again.
    """
    if lift_where_direct(connection):
        connection.execute(_LIMIT_SESSION)
        connection.limits_locks = True


def lift_for_transaction(connection: Connection) -> None:
    """Lift the timeouts for the open transaction only, before any other statement; safe behind a pooler."""
    _lift(connection, local=True)


@contextlib.contextmanager
def lifted(connection: Connection) -> Iterator[None]:
    """Open a transaction (or savepoint) of the broker without timeouts; safe behind a pooler."""
    with connection.transaction():
        lift_for_transaction(connection)
        yield


@contextlib.contextmanager
def lock_limited(connection: Connection) -> Iterator[None]:
    """Open a transaction (or savepoint) that raises LockNotAvailable after one second of waiting for a lock."""
    with connection.transaction():
        connection.execute(_LIMIT)
        yield


def lasts(connection: Connection) -> bool:
    """Whether the connection keeps its session: a pooler may give each transaction another one."""
    return isinstance(connection, BrokerConnection) and connection.is_direct


def _lift(connection: Connection, *, local: bool) -> None:
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT + _kept(connection), [local])


def _kept(connection: Connection) -> LiteralString:
    """Return the end of the statement that lifts the timeouts, which leaves out a limit that the broker has set."""
    limits_locks = isinstance(connection, BrokerConnection) and connection.limits_locks
    return " AND name <> 'lock_timeout'" if limits_locks else ""
