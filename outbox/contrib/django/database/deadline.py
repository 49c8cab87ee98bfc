"""One deadline for all database requests of a request to the operations page.

Two limits enforce it. The session's own limits end a statement whose web process has died. The deadline in this process
ends what those limits cannot: several statements in a row, and a server that does not answer.

See decision 191.
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

# A lock that another session holds this long is reported instead of waited for.
LOCK_SECONDS: Final = 1.0

_LIMIT: Final = """
SELECT set_config('statement_timeout', %(statement)s, true), set_config('lock_timeout', %(lock)s, true)
"""

_deadline: ContextVar[float | None] = ContextVar("outbox_deadline", default=None)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Until the end of the block, all database requests together have `seconds`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float | None:
    """The remaining time, at least a millisecond; None without a deadline."""
    deadline = _deadline.get()
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def limits() -> dict[str, str] | None:
    """statement_timeout and lock_timeout for the next transaction in milliseconds; None without a deadline."""
    left = seconds_left()
    if left is None:
        return None
    return {"statement": str(round(left * 1000) or 1), "lock": str(round(min(left, LOCK_SECONDS) * 1000) or 1)}


@contextlib.contextmanager
def kept(connection: BrokerConnection) -> Iterator[None]:
    """Enforce the deadline on a connection to the broker, if there is one. A late statement is cancelled.

    Raises psycopg's QueryCanceled, or BrokerUnavailable if the server does not answer the cancellation either.
    """
    deadline = _deadline.get()
    if deadline is None:
        yield
    else:
        with connection.within(deadline, cancel=True):
            yield


@contextlib.contextmanager
def kept_in_transaction(connection: BrokerConnection, schema: str) -> Iterator[None]:
    """Like `kept`, and in one transaction whose statements the server limits too.

    Without a deadline it does nothing.
    """
    values = limits()
    if values is None:
        yield
    else:
        # The settings end with the transaction: behind a pooler, the next transaction on the session has its own again.
        with kept(connection), connection.transaction():
            Executor(connection, schema).execute(Statement(_LIMIT), values)
            yield


@contextlib.contextmanager
def kept_by_application(alias: str) -> Iterator[None]:
    """A transaction on the application's database with limits on its statements; without a deadline, no transaction.

    Raises Django's OperationalError for a cancelled statement.
    """
    values = limits()
    if values is None or connections[alias].vendor != "postgresql":
        yield
    else:
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(_LIMIT, values)
            yield
