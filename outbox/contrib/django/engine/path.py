"""Which path a publish call takes: proven once per alias and process, and looked after with every message.

The proof is live (outbox.broker.database.server_identity): a lock taken on the broker's way is seen through the
application's connection. What it found stays for the life of the process, so that a failover never changes the
path silently.
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
from outbox.contrib.django.engine.broker import path_reports, remembered_paths
from outbox.contrib.django.settings.conf import OutboxSettings, PathChoice
from outbox.errors import ConfigurationError, OutboxError, SendFailed, WrongDatabase

logger = logging.getLogger(__name__)


def takes_atomic_path(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> bool:
    """Whether messages of the transaction that is open on this connection are written by it.

    Raises WrongDatabase where only that path is right, but the connection does not reach the broker;
    BrokerUnavailable or SendFailed where that could not be found out; and ConfigurationError.
    """
    if not settings.has_database or settings.path is PathChoice.TWO_PHASE:
        return False
    if connection.vendor != "postgresql":
        if settings.path is PathChoice.ATOMIC:
            raise ConfigurationError(
                f"OUTBOX['PATH'] is 'atomic', but {connection.alias!r} is a {connection.display_name} database and the "
                f"broker is not in it: set PATH to 'auto'."
            )
        return False
    refuse_in_tests(settings.broker)
    paths = remembered_paths()
    named = place_named_by(connection.alias)
    if named not in paths:
        proven = prove(connection, settings)
        if proven is None and (settings.path is PathChoice.ATOMIC or connection.alias == settings.broker):
            raise _reported(_elsewhere(connection, settings), connection.alias, settings)
        paths.setdefault(named, proven)
    return paths[named] is not None


def confirm(connection: BaseDatabaseWrapper, settings: OutboxSettings, place: ServerIdentity) -> None:
    """Make sure that what this connection has just written, at `place`, lies in the broker's own database.

    Costs nothing while the place is the proven one. Where it is another (the server was restarted, or the
    connection leads to another one now) it is proven anew, in the same transaction. Raises what `prove` raises, and
    WrongDatabase when the broker is not there: the transaction must not commit.
    """
    paths = remembered_paths()
    named = place_named_by(connection.alias)
    if paths.get(named) == place:
        return
    if prove(connection, settings) != place:
        raise _reported(_elsewhere(connection, settings), connection.alias, settings)
    paths[named] = place


def prove(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> ServerIdentity | None:
    """Where this connection is, if that is the broker's own database; None if it is not.

    Raises BrokerUnavailable when the broker, and SendFailed when this connection cannot be asked.
    """
    with marked(broker_database(settings), timeout_seconds=settings.send_timeout_seconds) as key:
        try:
            with connection.wrap_database_errors:
                return find_mark(connection.connection, key)
        except (DatabaseError, InterfaceError) as error:
            raise SendFailed(
                f"the connection {connection.alias!r} could not be asked whether it reaches the broker: "
                f"{str(error).strip()}. Nothing was published; run the whole operation again, in a new transaction."
            ) from error


# Every publish would raise the next one.
_REPORT_EVERY_SECONDS: Final = 60.0


def _reported(error: WrongDatabase, alias: str, settings: OutboxSettings) -> WrongDatabase:
    """Let the broker's status know what only this process can see. Never fails: the error itself matters more."""
    now, reports = time.monotonic(), path_reports()
    if now - reports.get(alias, -_REPORT_EVERY_SECONDS) >= _REPORT_EVERY_SECONDS:
        reports[alias] = now
        subject = f"alias {alias!r} of process {os.getpid()} on {socket.gethostname()}"
        try:
            with broker_database(settings).connect(name="outbox-path") as broker:
                found = Incident(IncidentKind.PATH, subject, str(error))
                incidents.record(Executor(broker, settings.schema), [found])
        except (OutboxError, psycopg.Error) as failure:
            logger.warning("that %s leads elsewhere could not be recorded: %s", subject, failure)
    return error


def _elsewhere(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> WrongDatabase:
    if settings.path is PathChoice.ATOMIC:
        expected = "which OUTBOX['PATH'] = 'atomic' rules out: set it to 'auto', or"
    elif connection.alias == settings.broker:
        expected = "although OUTBOX['BROKER'] names this alias (a pooler, a list of hosts, a failover half done?):"
    else:
        expected = (
            "although this process has written its messages there before (a failover?). If the broker shall stay "
            "where it is, restart the process: messages then take the two-phase path. Otherwise"
        )
    return WrongDatabase(
        f"the connection {connection.alias!r} reaches another server or database than the broker's, {expected} let "
        f"both lead to the same primary, then run the whole operation again. Nothing was published."
    )
