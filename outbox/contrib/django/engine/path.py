"""Chooses the path of a publish call.

Each process proves the path of an alias once, and verifies the path with every message.

The proof is a lock (see outbox.broker.database.server_identity). The broker's connection takes the lock, and the
application's connection must see this lock. The result of the proof is valid until the process ends, so a failover
never changes the path silently.

See decision 026.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Final

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, InterfaceError

from outbox.broker.database.executor import Executor
from outbox.broker.database.server_identity import ServerIdentity, find_mark, marked
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.contrib.django.database.aliases import broker_database, place_named_by
from outbox.contrib.django.database.in_tests import refuse_in_tests
from outbox.contrib.django.engine.broker import CurrentEngine
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.errors import OutboxError, SendFailed, WrongDatabase

logger = logging.getLogger(__name__)


def proven_server(connection: BaseDatabaseWrapper, current: CurrentEngine) -> ServerIdentity | None:
    """The broker's server if this connection's open transaction writes the messages itself, else None.

    The transaction writes them (the atomic path) if the connection reaches the broker's own database; otherwise
    publishing takes the two-phase path.
    Raises WrongDatabase if OUTBOX['BROKER'] names the alias of this connection, but the connection does not reach the
    broker. Raises BrokerUnavailable or SendFailed if the path could not be determined.
    """
    settings = current.settings
    if not current.has_database or connection.vendor != "postgresql":
        return None
    refuse_in_tests(settings.broker)
    paths = current.paths
    named = current.place if connection.alias == settings.broker else place_named_by(connection.alias)
    if named not in paths:
        proven = prove(connection, settings)
        if proven is None and connection.alias == settings.broker:
            raise _reported(_elsewhere(connection, settings), connection.alias, current)
        paths.setdefault(named, proven)
    return paths[named]


def confirm(connection: BaseDatabaseWrapper, current: CurrentEngine, place: ServerIdentity) -> None:
    """Verify that this connection has written its row into the broker's own database.

    Call it if `place`, which stored the row, is not the proven server: after a restart, or because the connection
    now leads to another server. The function repeats the proof in the same transaction. Raises the errors of `prove`.
    Raises WrongDatabase if the broker is not on that server; after this error the transaction must not commit.
    """
    settings = current.settings
    if prove(connection, settings) != place:
        raise _reported(_elsewhere(connection, settings), connection.alias, current)
    current.paths[current.place_of(connection.alias)] = place


def prove(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> ServerIdentity | None:
    """The broker's server if this connection reaches the broker's own server and database, else None.

    Raises BrokerUnavailable if the broker does not answer, and SendFailed if this connection does not answer.
    """
    with marked(broker_database(settings), timeout_seconds=settings.send_timeout_seconds) as key:
        try:
            with connection.wrap_database_errors:
                return find_mark(connection.connection, key)
        except (DatabaseError, InterfaceError) as error:
            raise SendFailed(
                f"the connection {connection.alias!r} did not answer whether it reaches the broker: "
                f"{str(error).strip()}. Nothing was published; run the whole operation again, in a new transaction."
            ) from error


# A process records at most one incident per alias in this number of seconds. Without this limit, every publish call
# would record the same problem again.
_REPORT_EVERY_SECONDS: Final = 60.0


def _reported(error: WrongDatabase, alias: str, current: CurrentEngine) -> WrongDatabase:
    """Record the error as an incident in the broker, because only this process sees the error. Returns the error.

    If the incident cannot be recorded, the function only logs this failure, because the caller must get `error`.
    """
    now, reports, settings = time.monotonic(), current.path_reports, current.settings
    if now - reports.get(alias, -_REPORT_EVERY_SECONDS) >= _REPORT_EVERY_SECONDS:
        reports[alias] = now
        subject = f"alias {alias!r} of process {os.getpid()} on {socket.gethostname()}"
        try:
            with broker_database(settings).connect(name="outbox-path") as broker:
                found = Incident(IncidentKind.PATH, subject, str(error))
                incidents.record(Executor(broker, settings.schema), [found])
        except (OutboxError, psycopg.Error) as failure:
            logger.warning("the incident of the wrong database of %s could not be recorded: %s", subject, failure)
    return error


def _elsewhere(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> WrongDatabase:
    if connection.alias == settings.broker:
        expected = "although OUTBOX['BROKER'] names this alias (a pooler, a list of hosts, an unfinished failover?):"
    else:
        expected = (
            "although it reached the broker's database before (a failover?). If this is intended, restart the "
            "process: messages then take the two-phase path. Otherwise"
        )
    return WrongDatabase(
        f"the connection {connection.alias!r} reaches another server or database than the broker's, {expected} let "
        f"this alias and the broker's alias reach the same primary server, then run the whole operation again. Nothing "
        f"was published."
    )
