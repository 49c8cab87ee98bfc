"""Lift the timeouts that a role or database sets, and set the broker's own limits.

The timeouts of a role or database are meant for applications. With such timeouts the broker could never finish a long
backlog, because each attempt would be interrupted and would start again from the beginning. The broker's own waits have
their own limits.

Behind a pooler, timeouts are set with SET LOCAL in the first statement of a transaction, because a pooler in
transaction mode passes a setting of the session on to other clients. The timeouts of a role still apply to a send,
which is part of a request of the application.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

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
# The statements that lift the timeouts, for callers that send them together with other statements.
LIFT: Final = Statement(_LIFT.replace("$1", "%(local)s"))


def lift_for_session(connection: Connection) -> None:
    """Lift the timeouts of a direct connection.

    Do not call this function behind a pooler in transaction mode: it would lift the timeouts of other clients, too.
    """
    _lift(connection, local=False)


def lift_where_direct(connection: Connection) -> bool:
    """Lift the timeouts of the session if there is no pooler, and return whether they were lifted.

    If the result is False, the caller has to open each transaction with `lifted`.

    The function asks the server whether there is a pooler, and does not trust the settings. With LISTEN_URL = "" the
    settings say that every connection goes through a pooler. A connection may be direct in spite of this setting, and
    its session then has the timeouts of its role.
    """
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT_WHERE_DIRECT, [False, connection.info.backend_pid])
        return cursor.rowcount > 0


def limit_locks_for_session(connection: Connection) -> None:
    """On a direct connection, make each statement raise LockNotAvailable after ten seconds of waiting for a lock."""
    connection.execute(_LIMIT_SESSION)


def lift_for_transaction(connection: Connection) -> None:
    """Lift the timeouts for the open transaction only; safe behind a pooler.

    Call this function before any other statement.
    """
    _lift(connection, local=True)


@contextlib.contextmanager
def lifted(connection: Connection) -> Iterator[None]:
    """Open a transaction (or savepoint) of the broker without timeouts; safe behind a pooler."""
    with connection.transaction():
        lift_for_transaction(connection)
        yield


@contextlib.contextmanager
def lock_limited(connection: Connection) -> Iterator[None]:
    """Open a transaction (or savepoint) that waits at most one second for a lock; safe behind a pooler.

    If a statement has waited one second for a lock, it raises LockNotAvailable. So the caller reports a locked table
    instead of waiting for the table.
    """
    with connection.transaction():
        connection.execute(_LIMIT)
        yield


def lasts(connection: Connection) -> bool:
    """Whether the connection keeps its session.

    A pooler in transaction mode may give each transaction another session.
    """
    return isinstance(connection, BrokerConnection) and connection.is_direct


def _lift(connection: Connection, *, local: bool) -> None:
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT, [local])
