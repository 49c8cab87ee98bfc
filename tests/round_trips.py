"""Counting how often a connection's statements go to the server and back, from libpq's own trace."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator

from psycopg import Connection
from psycopg.pq.abc import PGconn


@contextlib.contextmanager
def counted(connection: Connection | PGconn) -> Iterator[Callable[[], int]]:
    """The number of ReadyForQuery messages of the server since the last call."""
    pgconn = connection.pgconn if isinstance(connection, Connection) else connection
    with tempfile.TemporaryFile() as trace:
        pgconn.trace(trace.fileno())

        def count() -> int:
            # libpq writes through a buffer of its own, which is written out with the end of the trace.
            pgconn.untrace()
            os.lseek(trace.fileno(), 0, os.SEEK_SET)
            found = trace.read().count(b"ReadyForQuery")
            os.ftruncate(trace.fileno(), 0)
            os.lseek(trace.fileno(), 0, os.SEEK_SET)
            pgconn.trace(trace.fileno())
            return found

        yield count
        pgconn.untrace()
