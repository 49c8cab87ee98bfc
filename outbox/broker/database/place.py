"""Whether two connections end in one database of one running server: tried, not compared.

A physical copy of a server has its system identifier and its database names. What no copy shares is the lock table
of a running server: a lock taken through one connection is seen through the other, or is not. The locks are those
of a transaction, so a pooler in transaction mode may be in between on either side.
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

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.timeouts import lifted
from outbox.errors import BrokerUnavailable


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """A database, and since when its server runs (seconds since 1970): another server or a restart is another place."""

    started_at: Decimal
    database: str


# The epoch does not depend on the session's time zone, nor on how the application loads timestamps.
_LOCK: Final = "SELECT pg_advisory_xact_lock(%s::bigint)"
_SEEN: Final = """
SELECT NOT pg_try_advisory_xact_lock(%s::bigint),
       extract(epoch FROM pg_postmaster_start_time())::numeric, current_database()::text
"""
_HERE: Final = "SELECT extract(epoch FROM pg_postmaster_start_time())::numeric, current_database()::text"


@contextmanager
def marked(database: BrokerDatabase, *, timeout_seconds: float) -> Iterator[int]:
    """Hold a lock with a random key (64 bits: nobody else's) in the broker's database during the block.

    On a connection opened for it: one that was kept may lead to where the broker was. Raises BrokerUnavailable.
    """
    key = secrets.randbits(64) - (1 << 63)
    deadline = time.monotonic() + timeout_seconds
    with (
        database.open(timeout_seconds=timeout_seconds, name="outbox-path") as connection,
        connection.within(deadline),
        # The block is the application's to leave: no timeout may end this session meanwhile.
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
    """Where this connection is, if the lock of `marked` is seen through it; None if it is elsewhere.

    The connection is in a transaction of any isolation level: locks are not part of its snapshot. Never waits.
    Raises psycopg.Error.
    """
    with cursor_on(connection) as cursor:
        row = cursor.execute(_SEEN, [key]).fetchone()
    assert row is not None
    return ServerIdentity(*row[1:]) if row[0] else None


def here(connection: Connection) -> ServerIdentity:
    """Where this connection is. Raises psycopg.Error."""
    with cursor_on(connection) as cursor:
        row = cursor.execute(_HERE).fetchone()
    assert row is not None
    return ServerIdentity(*row)
