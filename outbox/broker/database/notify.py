"""Wake-ups between processes. They only save waiting: everything also works by slow polling.

A NOTIFY takes a lock on all of PostgreSQL's notification queue at commit, so it is always a statement of its
own after the commit it announces, and a burst becomes one.
"""

from __future__ import annotations

import enum
import logging
import select
import socket
from typing import Final

import psycopg
from psycopg import sql

from outbox.backoff import Backoff
from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.one_way import Request
from outbox.broker.database.statement import Statement
from outbox.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

# For whoever has lost its connection to the broker's database.
RECONNECT: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)


class Channel(enum.StrEnum):
    """What is announced."""

    DECIDED = "decided"
    """Producers to the sequencer: something may be ready to be queued."""
    QUEUED = "queued"
    """The sequencer to consumers: queues have grown. With their ids, or with nothing where they are many."""
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


def announcement(schema: str, channel: Channel) -> Request:
    """The same for a connection whose answers nobody waits for."""
    text, _ = _NOTIFY.numbered(schema)
    return Request(text, (channel.name_in(schema).encode(),), "a wake-up", is_said_once=True)


def listen(run: Executor, *channels: Channel) -> None:
    """LISTEN on a broker's channels."""
    for channel in channels:
        run.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel.name_in(run.schema))))


def unlisten(run: Executor, channel: Channel) -> None:
    """Hear no more of a channel: each announcement on one costs every session that listens a little."""
    run.connection.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel.name_in(run.schema))))


class Announcements:
    """The announcements that arrive on one listening connection, also while it runs other statements."""

    def __init__(self, connection: Connection) -> None:
        self._pgconn = connection.pgconn
        self._arrived: dict[str, set[str]] = {}
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        connection.add_notify_handler(lambda notification: self._add(notification.channel, notification.payload))

    def wait(self, timeout: float | None, bell: socket.socket | None = None) -> dict[str, set[str]]:
        """What was announced since the last call, by channel: at once if there is any, else within `timeout` seconds.

        Also returns when `bell` becomes readable. Raises psycopg.OperationalError when the connection is gone.
        """
        self._consume()
        if not self._arrived:
            if bell is not None:
                self._poll.register(bell, select.POLLIN)
            self._poll.poll(None if timeout is None else timeout * 1000)
            self._consume()
        arrived, self._arrived = self._arrived, {}
        return arrived

    def pending(self, channel: str) -> bool:
        """Whether something was announced on a channel since the last `wait`."""
        self._consume()
        return channel in self._arrived

    def _consume(self) -> None:
        self._pgconn.consume_input()
        while notification := self._pgconn.notifies():
            self._add(notification.relname.decode(), notification.extra.decode())

    def _add(self, channel: str, payload: str) -> None:
        self._arrived.setdefault(channel, set()).add(payload)
