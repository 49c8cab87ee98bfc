"""Find out by a lock whether two connections reach the same database of the same running server.

A physical copy of a server has the same system identifier and the same database names. Only the lock table of a running
server is unique. If one connection sees a lock that the other connection holds, both connections reach the same server.
The locks belong to a transaction, so each connection may go through a pooler in transaction mode.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import psycopg

from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import cursor_on
from outbox.broker.database.timeouts import lifted
from outbox.errors import BrokerUnavailable


class ServerIdentity(NamedTuple):
    """A database, and the start time of its server (seconds since 1970, as text).

    Two servers have different identities. After a restart, a server has a new identity.
    """

    started_at: str
    database: str


# The statement returns seconds since 1970. A number of seconds does not depend on the session's time zone, or on the
# loader that the application uses for timestamps.
_LOCK: Final = "SELECT pg_advisory_xact_lock(%s::bigint)"
_SEEN: Final = """
SELECT NOT pg_try_advisory_xact_lock($1::bigint),
       extract(epoch FROM pg_postmaster_start_time())::numeric::text, current_database()::text
"""


@contextmanager
def marked(database: BrokerDatabase, *, timeout_seconds: float) -> Iterator[int]:
    """Hold a lock with a random 64-bit key in the broker's database during the block.

    The lock uses a new connection, because a pooled connection may still reach the former server of the broker. Raises
    BrokerUnavailable.
    """
    key = secrets.randbits(64) - (1 << 63)
    deadline = time.monotonic() + timeout_seconds
    with (
        database.open(timeout_seconds=timeout_seconds, name="outbox-path") as connection,
        connection.within(deadline),
        # The application decides when the block ends, so no timeout may end this session.
        lifted(connection),
    ):
        try:
            connection.execute(_LOCK, [key])
        except psycopg.Error as error:
            raise BrokerUnavailable(
                f"the broker's database did not take a lock: {str(error).strip()}. Nothing was published."
            ) from error
        yield key


def find_mark(connection: Connection, key: int) -> ServerIdentity | None:
    """Return the server and database of this connection if it sees the lock of `marked`, else None.

    The connection may be in a transaction of any isolation level: locks are not part of its snapshot. Never waits.
    Raises psycopg.Error.
    """
    with cursor_on(connection) as cursor:
        row = cursor.execute(_SEEN, [key]).fetchone()
    assert row is not None
    # In a session with client_encoding SQL_ASCII, psycopg returns bytes.
    texts = [value.decode() if isinstance(value, bytes) else value for value in row[1:]]
    return ServerIdentity(*texts) if row[0] else None
