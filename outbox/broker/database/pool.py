"""A small pool of connections that is safe to inherit by fork."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg.pq import TransactionStatus

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.errors import UsageError

# Connections inherited by fork are kept open: closing one would end the parent's session.
_inherited: Final[list[object]] = []


class Pool:
    """Idle connections for reuse. Thread-safe. A forked child starts with none and never uses its parent's."""

    def __init__(self, database: BrokerDatabase, *, keep: int = 8) -> None:
        self._database = database
        self._keep = keep
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[BrokerConnection] = []
        self._is_closed = False

    @contextmanager
    def connection(self, deadline: float) -> Iterator[BrokerConnection]:
        """Lend an autocommit connection whose statements end by `deadline` (monotonic).

        The pool does not keep a broken connection.
        """
        connection = self._take() or self._database.open(timeout_seconds=deadline - time.monotonic())
        try:
            with connection.within(deadline):
                yield connection
        except UsageError:
            # The server refused a statement that is over: the connection can be used again.
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)

    def _take(self) -> BrokerConnection | None:
        if self._pid != os.getpid():
            _inherited.append(self._idle)
            self._start_anew()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _is_ended(connection):
                return connection
            connection.close()

    def _give_back(self, connection: BrokerConnection) -> None:
        with self._lock:
            is_idle = connection.info.transaction_status == TransactionStatus.IDLE
            if is_idle and len(self._idle) < self._keep and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close the idle connections."""
        if self._pid != os.getpid():
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the idle connections. Later, close each one that another thread gives back."""
        self._is_closed = True
        self.clear()


def _is_ended(connection: BrokerConnection) -> bool:
    """Whether the server has ended this idle session (idle_session_timeout, a restart). Asks only the socket."""
    try:
        # Twice: the first call reads the server's reason, the second one finds the end of the connection.
        for _ in range(2):
            poll = select.poll()
            poll.register(connection.pgconn.socket, select.POLLIN)
            if not poll.poll(0):
                return False
            connection.pgconn.consume_input()
    except (psycopg.Error, OSError, ValueError):
        return True
    return connection.closed
