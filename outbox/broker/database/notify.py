"""Notifications between processes. Notifications only shorten waits: without them, the processes poll slowly.

A NOTIFY takes a lock on PostgreSQL's whole notification queue at commit. So a process sends NOTIFY as a separate
statement, after the commit that it announces. One NOTIFY announces a burst of commits.
"""

from __future__ import annotations

import enum
import functools
import logging
import select
import socket
from typing import Final

import psycopg
from psycopg import sql

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Request
from outbox.errors import BrokerUnavailable
from outbox.utils.backoff import Backoff

logger = logging.getLogger(__name__)

# A process that has lost its connection to the broker's database waits this long before it connects again.
RECONNECT: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)


class Channel(enum.StrEnum):
    """The kinds of notifications, with a PostgreSQL channel for each kind."""

    DECIDED = "decided"
    """From producers to the sequencer: messages may be ready for their queues."""
    QUEUED = "queued"
    """From the sequencer to consumers: queues have new entries. The payload has up to 50 queue ids, or is empty."""
    SHARED = "shared"
    """From consumers to consumers: a group's members, its leases or its `paused` flag have changed."""

    @functools.cache
    def name_in(self, schema: str) -> str:
        """Return the PostgreSQL channel of a broker."""
        return f"{schema}_{self.value}"


def notify(run: Executor, channel: Channel) -> bool:
    """Send a notification on an autocommit connection, and return whether it was sent. An error is only logged."""
    try:
        run.connection.execute(announcement(run.schema, channel).text)
    except (psycopg.Error, BrokerUnavailable) as error:
        logger.debug("a notification on channel %s was not sent: %s", channel.name_in(run.schema), error)
        return False
    return True


@functools.cache
def announcement(schema: str, channel: Channel) -> Request:
    """Return the notification as a request for a connection that does not wait for answers."""
    # The server does not plan a NOTIFY command. The commit has written no data, so it does not wait for the disk,
    # regardless of synchronous_commit.
    text = sql.SQL("NOTIFY {}").format(sql.Identifier(channel.name_in(schema))).as_bytes(None)
    return Request(text, (), "a notification", is_said_once=True)


def listen(run: Executor, *channels: Channel) -> None:
    for channel in channels:
        run.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel.name_in(run.schema))))


def unlisten(run: Executor, channel: Channel) -> None:
    """Stop listening on a channel, because each notification costs every listening session some time."""
    run.connection.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel.name_in(run.schema))))


class Announcements:
    """Notifications that arrive on one listening connection, also while the connection executes other statements.

    On the channel `without_own`, those that this connection has sent itself are dropped.
    """

    def __init__(self, connection: Connection, *, without_own: str = "") -> None:
        self._pgconn = connection.pgconn
        self._without_own = without_own
        self._arrived: dict[str, set[str]] = {}
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        connection.add_notify_handler(
            lambda notification: self._add(notification.channel, notification.payload, notification.pid)
        )

    def wait(self, timeout: float | None, wake_up: socket.socket | None = None) -> dict[str, set[str]]:
        """Return the notifications since the last call, by channel; without one, wait up to `timeout` seconds.

        It also returns when `wake_up` becomes readable. Raises psycopg.OperationalError when the connection is lost.
        """
        self._consume()
        if not self._arrived:
            if wake_up is not None:
                self._poll.register(wake_up, select.POLLIN)
            self._poll.poll(None if timeout is None else timeout * 1000)
            self._consume()
        arrived, self._arrived = self._arrived, {}
        return arrived

    def discard(self, channel: str) -> None:
        """Drop the notifications on a channel that have arrived since the last `wait`."""
        self._consume()
        self._arrived.pop(channel, None)

    def _consume(self) -> None:
        self._pgconn.consume_input()
        while notification := self._pgconn.notifies():
            self._add(notification.relname.decode(), notification.extra.decode(), notification.be_pid)

    def _add(self, channel: str, payload: str, sender: int) -> None:
        if channel != self._without_own or sender != self._pgconn.backend_pid:
            self._arrived.setdefault(channel, set()).add(payload)
