"""Find out by a lock whether two connections reach the same database of the same running server.

A physical copy of a server has the same system identifier and the same database names. Only the lock table of a running
server is unique: a lock that one connection takes is visible to the other one, or it is not. The locks belong to a
transaction, so a pooler in transaction mode may be in between on either side.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import psycopg

from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import cursor_on
from outbox.broker.database.timeouts import lifted
from outbox.errors import BrokerUnavailable


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """A database, and the start time of its server (seconds since 1970).

    Another server, or a restart, makes it another identity.
    """

    started_at: Decimal
    database: str


# The epoch depends neither on the session's time zone nor on how the application loads timestamps.
_LOCK: Final = "SELECT pg_advisory_xact_lock(%s::bigint)"
_SEEN: Final = """
SELECT NOT pg_try_advisory_xact_lock(%s::bigint),
       extract(epoch FROM pg_postmaster_start_time())::numeric, current_database()::text
"""
_HERE: Final = "SELECT extract(epoch FROM pg_postmaster_start_time())::numeric, current_database()::text"


@contextmanager
def marked(database: BrokerDatabase, *, timeout_seconds: float) -> Iterator[int]:
    """Hold a lock with a random 64-bit key in the broker's database during the block.

    It uses a new connection: a pooled one may reach the server that the broker had before. Raises BrokerUnavailable.
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
    """Return where this connection is if it sees the lock of `marked`; None if it is elsewhere.

    The connection may be in a transaction of any isolation level: locks are not part of its snapshot. Never waits.
    Raises psycopg.Error.
    """
    with cursor_on(connection) as cursor:
        row = cursor.execute(_SEEN, [key]).fetchone()
    assert row is not None
    return ServerIdentity(*row[1:]) if row[0] else None


def here(connection: Connection) -> ServerIdentity:
    """Return where this connection is. Raises psycopg.Error."""
    with cursor_on(connection) as cursor:
        row = cursor.execute(_HERE).fetchone()
    assert row is not None
    return ServerIdentity(*row)
