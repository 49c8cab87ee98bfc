"""One deadline for all database requests of one HTTP request to the operations page.

Two kinds of limits enforce the deadline. The timeouts of the database session end a statement even if the web process
has died. The deadline in the web process also ends a series of statements, and the wait for a server that does not
answer.

The timeouts are set with SET LOCAL, because a pooler in transaction mode gives the session to other clients. A
confirmed action has a second deadline, because its plan may have used most of the first one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from django.db import connections, transaction

from outbox.broker.database.connection import BrokerConnection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# If a request waits for a lock of another session for longer than this number of seconds, the request fails and reports
# the lock.
LOCK_SECONDS: Final = 1.0

_LIMIT: Final = """
SELECT set_config('statement_timeout', %(statement)s, true), set_config('lock_timeout', %(lock)s, true)
"""

_deadline: ContextVar[float | None] = ContextVar("outbox_deadline", default=None)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit all database requests in the block together to `seconds`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float | None:
    """The seconds until the deadline, at least 0.001; None without a deadline."""
    deadline = _deadline.get()
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def limits() -> dict[str, str] | None:
    """The next transaction's statement_timeout and lock_timeout in milliseconds; None without a deadline."""
    left = seconds_left()
    if left is None:
        return None
    return {"statement": str(round(left * 1000) or 1), "lock": str(round(min(left, LOCK_SECONDS) * 1000) or 1)}


@contextlib.contextmanager
def kept(connection: BrokerConnection) -> Iterator[None]:
    """Enforce the deadline (if one is set) on a connection to the broker: cancel a late statement.

    Raises psycopg's QueryCanceled. Raises BrokerUnavailable if the server does not answer the cancellation either.
    """
    deadline = _deadline.get()
    if deadline is None:
        yield
    else:
        with connection.within(deadline, cancel=True):
            yield


@contextlib.contextmanager
def kept_in_transaction(connection: BrokerConnection, schema: str) -> Iterator[None]:
    """Do the same as `kept`, and begin one transaction with a statement timeout and a lock timeout in the server.

    Without a deadline, this function does nothing.
    """
    values = limits()
    if values is None:
        yield
    else:
        # The timeouts end with the transaction, so behind a pooler they do not apply to the next transaction of the
        # session.
        with kept(connection), connection.transaction():
            Executor(connection, schema).execute(Statement(_LIMIT), values)
            yield


@contextlib.contextmanager
def kept_by_application(alias: str) -> Iterator[None]:
    """A transaction on the application's database with a statement timeout and a lock timeout.

    Without a deadline, or on another database than PostgreSQL, this function does nothing.

    If the server cancels a statement, Django's OperationalError is raised.
    """
    values = limits()
    if values is None or connections[alias].vendor != "postgresql":
        yield
    else:
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(_LIMIT, values)
            yield
