"""Chooses the path of a publish call: proven once per alias and process, and verified with every message.

The proof (outbox.broker.database.server_identity) is a lock: taken through the broker's connection, it must be visible
through the application's connection. The result holds until the process ends, so a failover never changes the path
silently.

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
from outbox.contrib.django.engine.broker import path_reports, remembered_paths
from outbox.contrib.django.settings.conf import OutboxSettings, PathChoice
from outbox.errors import ConfigurationError, OutboxError, SendFailed, WrongDatabase

logger = logging.getLogger(__name__)


def takes_atomic_path(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> bool:
    """Whether this connection's open transaction writes the messages itself (the atomic path).

    Raises WrongDatabase if only that path is allowed, but the connection does not reach the broker. Raises
    BrokerUnavailable or SendFailed if this could not be determined, and ConfigurationError.
    """
    if not settings.has_database or settings.path is PathChoice.TWO_PHASE:
        return False
    if connection.vendor != "postgresql":
        if settings.path is PathChoice.ATOMIC:
            raise ConfigurationError(
                f"OUTBOX['PATH'] is 'atomic', but {connection.alias!r} is a {connection.display_name} database and "
                "the broker is not in it: set PATH to 'auto'."
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
    """Verify that the row just written by this connection, at `place`, is in the broker's own database.

    It costs nothing while the place is the proven one. If the place differs (the server was restarted, or the
    connection leads elsewhere now), it is proven again in the same transaction. Raises as `prove` does, and
    WrongDatabase if the broker is not there: the transaction must not commit.
    """
    paths = remembered_paths()
    named = place_named_by(connection.alias)
    if paths.get(named) == place:
        return
    if prove(connection, settings) != place:
        raise _reported(_elsewhere(connection, settings), connection.alias, settings)
    paths[named] = place


def prove(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> ServerIdentity | None:
    """The place of this connection if it is the broker's own database, else None.

    Raises BrokerUnavailable if the broker does not answer, and SendFailed if this connection does not.
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


# Limit it: every publish would record the same problem again.
_REPORT_EVERY_SECONDS: Final = 60.0


def _reported(error: WrongDatabase, alias: str, settings: OutboxSettings) -> WrongDatabase:
    """Record for the broker's status what only this process can see. Never raises: the original error matters more."""
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
        expected = "which OUTBOX['PATH'] = 'atomic' does not allow: set it to 'auto', or"
    elif connection.alias == settings.broker:
        expected = "although OUTBOX['BROKER'] names this alias (a pooler, a list of hosts, an unfinished failover?):"
    else:
        expected = (
            "although this process wrote its messages there before (a failover?). If the broker is meant to stay "
            "there, restart the process: messages then take the two-phase path. Otherwise"
        )
    return WrongDatabase(
        f"the connection {connection.alias!r} reaches another server or database than the broker's, {expected} let "
        f"both lead to the same primary, then run the whole operation again. Nothing was published."
    )
