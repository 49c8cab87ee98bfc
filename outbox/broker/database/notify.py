"""Wake-ups between processes. They only save waiting: everything also works by slow polling.

A NOTIFY takes a lock on all of PostgreSQL's notification queue at commit, so it is always a statement of its
own after the commit it announces, and a burst becomes one.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import socket
import threading
from typing import Final

import psycopg
from psycopg import sql

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.statement import Statement
from outbox.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

_COALESCE_SECONDS: Final = 0.002
_RECONNECT_SECONDS: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
# Connections inherited by fork are kept, not closed: closing would end the parent's session.
_inherited: list[object] = []


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


def notify(connection: Connection, schema: str, channel: Channel) -> bool:
    """Announce on an autocommit connection. An error is logged and ignored; returns whether it was sent."""
    try:
        with cursor_on(connection) as cursor:
            cursor.execute(_NOTIFY.on(schema), {"channel": channel.name_in(schema)}, prepare=True)
    except (psycopg.Error, BrokerUnavailable) as error:
        logger.debug("a wake-up on %s was not sent: %s", channel.name_in(schema), error)
        return False
    return True


def keep_inherited(things: object) -> None:
    """Never close what a forked child inherited: its parent still uses the sessions."""
    _inherited.append(things)


def backoff_seconds(failures: int) -> float:
    """The pause after so many failed attempts in a row (from 1)."""
    return _RECONNECT_SECONDS[min(failures, len(_RECONNECT_SECONDS)) - 1]


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
                    sent = all(notify(connection, self._database.schema, channel) for channel in channels)
                except BrokerUnavailable:
                    sent = False
                failures = 0 if sent else failures + 1
                if not sent and connection is not None:
                    connection.close()
                    connection = None
                self._stopping.wait(backoff_seconds(failures) if failures else _COALESCE_SECONDS)
        finally:
            if connection is not None:
                connection.close()


class Listener:
    """One LISTEN connection of a process, with a thread that reconnects. Thread-safe and fork-safe."""

    def __init__(
        self, database: BrokerDatabase, channels: tuple[Channel, ...] = (Channel.DECIDED, Channel.QUEUED)
    ) -> None:
        self._database = database
        self._channels = channels
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._news = threading.Condition()
        self._counts = dict.fromkeys(Channel, 0)
        self._seen = threading.local()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._bell_in, self._bell_out = socket.socketpair()

    def wait(self, channel: Channel, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True when something was announced since this thread's last call.

        Also true once after a reconnection, since announcements may have been missed. With LISTEN off it
        only waits.
        """
        if self._pid != os.getpid():
            _inherited.append((self._thread, self._bell_in, self._bell_out))
            self._start_anew()
        seen: dict[Channel, int] = self._seen.__dict__.setdefault("counts", dict.fromkeys(Channel, 0))
        with self._news:
            self._ensure_thread()
            found = self._news.wait_for(lambda: self._closed or self._counts[channel] > seen[channel], timeout)
            seen[channel] = self._counts[channel]
            return found and not self._closed

    def wake(self) -> None:
        """Let every waiting thread of this process return, as after an announcement."""
        with self._news:
            for channel in self._counts:
                self._counts[channel] += 1
            self._news.notify_all()

    def close(self) -> None:
        """End the thread and its connection."""
        if self._pid != os.getpid():
            return
        with self._news:
            self._closed = True
            thread, self._thread = self._thread, None
            self._news.notify_all()
        if thread is not None:
            self._bell_out.send(b"x")
            thread.join(timeout=5)
        self._bell_in.close()
        self._bell_out.close()

    def _ensure_thread(self) -> None:
        if self._thread is None and not self._closed and self._database.listen_conninfo != "":
            self._thread = threading.Thread(target=self._run, name="outbox-listener", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                with contextlib.closing(self._database.connect(name="outbox-listener", direct=True)) as connection:
                    listen(connection, self._database.schema, *self._channels)
                    failures = 0
                    self.wake()
                    self._follow(connection)
            except (psycopg.Error, BrokerUnavailable) as error:
                failures += 1
                pause = backoff_seconds(failures)
                logger.warning("wake-ups are lost, polling meanwhile; connecting again in %.1f s: %s", pause, error)
                with self._news:
                    self._news.wait_for(lambda: self._closed, pause)

    def _follow(self, connection: Connection) -> None:
        names = {channel.name_in(self._database.schema): channel for channel in Channel}
        announcements = Announcements(connection)
        while not self._closed:
            arrived = announcements.wait(None, self._bell_in)
            with self._news:
                for name in arrived:
                    self._counts[names[name]] += 1
                self._news.notify_all()


def listen(connection: Connection, schema: str, *channels: Channel) -> None:
    """LISTEN on a broker's channels."""
    for channel in channels:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel.name_in(schema))))


class Announcements:
    """The announcements that arrive on one listening connection, also while it runs other statements."""

    def __init__(self, connection: Connection) -> None:
        self._pgconn = connection.pgconn
        self._arrived: set[str] = set()
        connection.add_notify_handler(lambda notification: self._arrived.add(notification.channel))

    def wait(self, timeout: float | None, bell: socket.socket | None = None) -> set[str]:
        """The channels announced since the last call: at once if there are any, else within `timeout` seconds.

        Also returns when `bell` becomes readable. Raises psycopg.OperationalError when the connection is gone.
        """
        self._consume()
        if not self._arrived:
            with selectors.DefaultSelector() as selector:
                selector.register(self._pgconn.socket, selectors.EVENT_READ)
                if bell is not None:
                    selector.register(bell, selectors.EVENT_READ)
                selector.select(timeout)
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
