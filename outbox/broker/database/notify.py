"""Wake-ups between processes. They only save waiting: everything also works by slow polling.

A NOTIFY takes a lock on all of PostgreSQL's notification queue at commit, so it is always a statement of its
own after the commit it announces, and a burst becomes one.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import socket
import threading
from typing import Final

import psycopg
from psycopg import sql

from outbox.backoff import Backoff
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

_COALESCE_SECONDS: Final = 0.002
# For whoever has lost its connection to the broker's database.
RECONNECT: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)


class Channel(enum.StrEnum):
    """What is announced."""

    DECIDED = "decided"
    """Producers to the sequencer: something may be ready to be queued."""
    QUEUED = "queued"
    """The sequencer to consumers: queues have grown."""
    SHARED = "shared"
    """Consumers to consumers: a group's members, leases or switches have changed."""

    def name_in(self, schema: str) -> str:
        """The PostgreSQL channel of a broker."""
        return f"{schema}_{self.value}"


# Nothing is lost with a lost notification, so its commit does not wait for the disk.
_NOTIFY = Statement("SELECT set_config('synchronous_commit', 'off', true), pg_notify(%(channel)s, '')")


def notify(run: Executor, channel: Channel) -> bool:
    """Announce on an autocommit connection. An error is logged and ignored; returns whether it was sent."""
    try:
        run.execute(_NOTIFY, {"channel": channel.name_in(run.schema)}, prepare=True)
    except (psycopg.Error, BrokerUnavailable) as error:
        logger.debug("a wake-up on %s was not sent: %s", channel.name_in(run.schema), error)
        return False
    return True


class Notifier:
    """Announces in the background, at most every 2 ms, on a connection of its own. Thread-safe and fork-safe."""

    def __init__(self, database: BrokerDatabase) -> None:
        self._database = database
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._pending: set[Channel] = set()
        self._thread: threading.Thread | None = None

    def notify(self, channel: Channel = Channel.DECIDED) -> None:
        """Announce soon; returns at once."""
        if self._pid != os.getpid():
            self._start_anew()
        with self._lock:
            self._pending.add(channel)
            if self._thread is None:
                self._stopping.clear()
                self._thread = threading.Thread(target=self._run, name="outbox-notifier", daemon=True)
                self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        """Announce what is pending and end the thread."""
        if self._pid != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            self._wanted.set()
            thread.join(timeout=5)

    def _run(self) -> None:
        connection: psycopg.Connection[tuple[object, ...]] | None = None
        failures = 0
        try:
            while not (self._stopping.is_set() and not self._pending):
                self._wanted.wait()
                self._wanted.clear()
                with self._lock:
                    channels, self._pending = self._pending, set()
                try:
                    connection = connection or self._database.connect(name="outbox-notifier")
                    sent = all(notify(Executor(connection, self._database.schema), channel) for channel in channels)
                except BrokerUnavailable:
                    sent = False
                failures = 0 if sent else failures + 1
                if not sent and connection is not None:
                    connection.close()
                    connection = None
                self._stopping.wait(RECONNECT.pause_seconds(failures) if failures else _COALESCE_SECONDS)
        finally:
            if connection is not None:
                connection.close()


def listen(run: Executor, *channels: Channel) -> None:
    """LISTEN on a broker's channels."""
    for channel in channels:
        run.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel.name_in(run.schema))))


class Announcements:
    """The announcements that arrive on one listening connection, also while it runs other statements."""

    def __init__(self, connection: Connection) -> None:
        self._pgconn = connection.pgconn
        self._arrived: set[str] = set()
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        connection.add_notify_handler(lambda notification: self._arrived.add(notification.channel))

    def wait(self, timeout: float | None, bell: socket.socket | None = None) -> set[str]:
        """The channels announced since the last call: at once if there are any, else within `timeout` seconds.

        Also returns when `bell` becomes readable. Raises psycopg.OperationalError when the connection is gone.
        """
        self._consume()
        if not self._arrived:
            if bell is not None:
                self._poll.register(bell, select.POLLIN)
            self._poll.poll(None if timeout is None else timeout * 1000)
            self._consume()
        arrived, self._arrived = self._arrived, set()
        return arrived

    def pending(self) -> bool:
        """Whether something was announced since the last `wait`."""
        self._consume()
        return bool(self._arrived)

    def _consume(self) -> None:
        self._pgconn.consume_input()
        while notification := self._pgconn.notifies():
            self._arrived.add(notification.relname.decode())
