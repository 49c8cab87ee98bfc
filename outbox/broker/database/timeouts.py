"""Lifting the timeouts that a role or database sets for statements, locks and transactions.

They are meant for applications. Under them a long backlog could never be worked off: the pass that is cut short is
tried again from its beginning. What the broker waits for has limits of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.statement import Statement

# transaction_timeout came with PostgreSQL 17.
_LIFT: Final = """
SELECT set_config(name, '0', %(local)s)
FROM unnest(ARRAY['statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout',
                  'idle_session_timeout']) AS name
WHERE current_setting(name, true) IS NOT NULL
"""
_LIFT_WHERE_DIRECT: Final = f"{_LIFT} AND pg_backend_pid() = %(told)s"
# To send together with other statements.
LIFT: Final = Statement(_LIFT)


def lift_for_session(connection: Connection) -> None:
    """For a direct connection: a pooler in transaction mode would pass the settings on to others."""
    _lift(connection, local=False)


def lift_where_direct(connection: Connection) -> bool:
    """As `lift_for_session` if no pooler is in between; returns whether it was done.

    A pooler gives its clients a process id of its own. Behind a pooler nothing is changed: use `lifted` there.
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


def lasts(database: BrokerDatabase) -> bool:
    """Whether the session of a direct connection lasts; where LISTEN is off there may be a pooler in between."""
    return database.listen_conninfo != ""


def _lift(connection: Connection, *, local: bool) -> None:
    with cursor_on(connection) as cursor:
        cursor.execute(_LIFT, {"local": local})
