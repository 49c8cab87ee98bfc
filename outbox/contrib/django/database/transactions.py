"""Finds the local transaction of a publish call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError

from outbox.contrib.django.database.blocks import begun_by_hand
from outbox.contrib.django.fastpath.atomic_blocks import is_test_case
from outbox.errors import ConfigurationError, TransactionUsageError


def current_transaction(using: str | None) -> BaseDatabaseWrapper | None:
    """The connection whose transaction a publish call joins; None if there is none.

    `using` names the alias. Without it, the alias is the only one on which this thread has a transaction. The
    transaction that a TestCase wraps around a test does not count. Raises TransactionUsageError if the transaction is
    ambiguous.
    """
    if using is not None:
        if using not in connections:
            raise ConfigurationError(
                f"publish(…, using={using!r}): that alias is not in DATABASES; use one of {', '.join(connections)}."
            )
        connection = connections[using]
        _refuse_manual_commit(connection)
        return connection if in_transaction(connection) else None
    opened = connections.all(initialized_only=True)
    for connection in opened:
        if connection.connection is not None:
            _refuse_manual_commit(connection)
    candidates = [connection for connection in opened if in_transaction(connection)]
    if len(candidates) > 1:
        aliases = ", ".join(repr(connection.alias) for connection in candidates)
        raise TransactionUsageError(
            f"transactions are open on {aliases}: say with which of them the message commits, publish(…, using=…)."
        )
    return candidates[0] if candidates else None


@contextmanager
def failing_takes_the_block_along(using: str | None) -> Iterator[None]:
    """Mark the atomic block of a publish call for rollback if the call fails for any reason.

    Otherwise a caller that continues would commit its row without the message. If the transaction of the call is
    ambiguous, no block is marked; the error says so.
    """
    try:
        yield
    except BaseException:
        with suppress(TransactionUsageError, ConfigurationError):
            connection = current_transaction(using)
            if connection is not None:
                connection.set_rollback(True)
        raise


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether an atomic block is open on the connection, other than that of a TestCase."""
    return not all(map(is_test_case, connection.atomic_blocks))


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection's outermost atomic block belongs to a TestCase, and so never commits."""
    return bool(connection.atomic_blocks) and is_test_case(connection.atomic_blocks[0])


def _refuse_manual_commit(connection: BaseDatabaseWrapper) -> None:
    if connection.in_atomic_block:
        manual = not connection.commit_on_exit
    elif connection.connection is None:
        # Do not connect to find out: this database may have no part in the message.
        manual = not connection.settings_dict["AUTOCOMMIT"]
    else:
        manual = not connection.get_autocommit()
    if not manual and begun_by_hand(connection):
        raise TransactionUsageError(
            f"a transaction was begun by hand on {connection.alias!r}, and outbox cannot see when it commits: put "
            f"the write and the publish call into `with transaction.atomic(using={connection.alias!r})` instead of "
            "BEGIN and COMMIT. If the message belongs to another database, name that: publish(…, using=…)."
        )
    if manual:
        raise TransactionUsageError(
            f"the connection {connection.alias!r} is in manual-commit mode (autocommit is off), and outbox cannot "
            "see when it commits: turn AUTOCOMMIT on and put the write and the publish call into `with "
            f"transaction.atomic(using={connection.alias!r})`. If the message belongs to another database, name "
            "that: publish(…, using=…)."
        )


def is_missing_table(error: DatabaseError) -> bool:
    """Whether a statement failed because its table is missing."""
    state = getattr(error.__cause__, "sqlstate", None)
    return state == "42P01" if state is not None else "no such table" in str(error)
