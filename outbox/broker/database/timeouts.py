"""Lifting the timeouts that a role or database sets for statements, locks and transactions; and a limit of our own.

The first are meant for applications. Under them a long backlog could never be worked off: the pass that is cut short is
tried again from its beginning. What the broker waits for has limits of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import BrokerConnection, Connection
from outbox.broker.database.statement import Statement

# transaction_timeout came with PostgreSQL 17.
_LIFT: Final = """
SELECT set_config(name, '0', %(local)s)
FROM unnest(ARRAY['statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout',
                  'idle_session_timeout']) AS name
WHERE current_setting(name, true) IS NOT NULL
"""
_LIFT_WHERE_DIRECT: Final = f"{_LIFT} AND pg_backend_pid() = %(told)s"
_LIMIT: Final = "SELECT set_config('lock_timeout', '1s', true)"
# To send together with other statements.
LIFT: Final = Statement(_LIFT)


def lift_for_session(connection: Connection) -> None:
    """For a direct connection: a pooler in transaction mode would pass the settings on to others."""
    _lift(connection, local=False)


def lift_where_direct(connection: Connection) -> bool:
    """As `lift_for_session` if no pooler is in between; returns whether it was done. Else use `lifted`.

    The server is asked, not the settings: with LISTEN_URL = "" a direct connection is taken for one through a pooler,
    and its session has the timeouts of its role all the same.
    """
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT_WHERE_DIRECT, {"local": False, "told": connection.info.backend_pid})
        return cursor.rowcount > 0


def lift_for_transaction(connection: Connection) -> None:
    """For the open transaction only, and safe behind a pooler. Make it the first statement."""
    _lift(connection, local=True)


@contextlib.contextmanager
def lifted(connection: Connection) -> Iterator[None]:
    """A transaction (or savepoint) of the broker's own without timeouts; safe behind a pooler."""
    with connection.transaction():
        lift_for_transaction(connection)
        yield


@contextlib.contextmanager
def lock_limited(connection: Connection) -> Iterator[None]:
    """A transaction (or savepoint) that waits for a lock no longer than a second; safe behind a pooler.

    Its statements raise LockNotAvailable: a table that is kept locked must be reported, not waited for.
    """
    with connection.transaction():
        connection.execute(_LIMIT)
        yield


def lasts(connection: Connection) -> bool:
    """Whether the connection keeps its session; a pooler in transaction mode may give each transaction another one."""
    return isinstance(connection, BrokerConnection) and connection.is_direct


def _lift(connection: Connection, *, local: bool) -> None:
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT, {"local": local})
