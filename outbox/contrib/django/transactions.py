"""Which local transaction a publish call belongs to, and what is known about its connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, OperationalError, ProgrammingError

from outbox.contrib.django import ledger
from outbox.errors import ConfigurationError, TransactionUsageError


def current_transaction(using: str | None) -> BaseDatabaseWrapper | None:
    """The connection whose transaction a publish call joins; None when the call stands alone.

    `using` names the alias; without it, it is the one alias this thread has a transaction on. The transaction
    that a TestCase wraps around a test does not count. Raises TransactionUsageError when it cannot be told.
    """
    if using is not None:
        if using not in connections:
            raise ConfigurationError(
                f"publish(…, using={using!r}): that alias is not in DATABASES; there are {', '.join(connections)}."
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
    """Mark the atomic block of a publish call for rollback when the call fails, for whatever reason.

    A caller that goes on would commit its row without the message. Where it cannot be told which transaction the
    call belongs to, none is marked: the error says so.
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
    """Whether an atomic block is open on the connection, other than the one of a TestCase."""
    return not all(map(_is_test_case, connection.atomic_blocks))


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection's outermost atomic block is that of a TestCase: it will never commit."""
    return bool(connection.atomic_blocks) and _is_test_case(connection.atomic_blocks[0])


def _is_test_case(block: Any) -> bool:
    return bool(block._from_testcase)


def _refuse_manual_commit(connection: BaseDatabaseWrapper) -> None:
    manual = not connection.commit_on_exit if connection.in_atomic_block else not connection.get_autocommit()
    if manual:
        raise TransactionUsageError(
            f"the connection {connection.alias!r} is in manual-commit mode (autocommit is off), where nobody tells "
            f"when it commits: turn AUTOCOMMIT on and put the write and the publish call into `with "
            f"transaction.atomic(using={connection.alias!r})`; if the message belongs to another database, name that: "
            f"publish(…, using=…)."
        )


@dataclass(slots=True)
class ConnectionFacts:
    """What was found out about one live connection: asked once, forgotten when Django reconnects."""

    raw: Any
    ledger_id: UUID | None = None


class _Facts(threading.local):
    def __init__(self) -> None:
        self.by_wrapper: WeakKeyDictionary[BaseDatabaseWrapper, ConnectionFacts] = WeakKeyDictionary()


_facts = _Facts()


def facts_of(connection: BaseDatabaseWrapper) -> ConnectionFacts:
    """The facts about the connection as it is now."""
    known = _facts.by_wrapper.get(connection)
    if known is None or known.raw is not connection.connection:
        known = _facts.by_wrapper[connection] = ConnectionFacts(raw=connection.connection)
    return known


def ledger_id_of(connection: BaseDatabaseWrapper) -> UUID:
    """The id of the ledger in the connection's database. Raises ConfigurationError when it has none."""
    facts = facts_of(connection)
    if facts.ledger_id is None:
        try:
            identity = ledger.identity(connection)
        except (ProgrammingError, OperationalError) as error:
            if not is_missing_table(error):
                raise
            raise ConfigurationError(
                f"the ledger's tables are missing on {connection.alias!r}: run "
                f"`manage.py migrate --database={connection.alias}`. Nothing was published."
            ) from error
        if identity is None:
            raise ConfigurationError(
                f"the ledger on {connection.alias!r} has no identity (the database was flushed?): run "
                f"`manage.py migrate --database={connection.alias}`."
            )
        facts.ledger_id = identity.ledger_id
    return facts.ledger_id


def is_missing_table(error: DatabaseError) -> bool:
    """Whether a statement failed because its table is not there."""
    state = getattr(error.__cause__, "sqlstate", None)
    return state == "42P01" if state is not None else "no such table" in str(error)


def forget_facts() -> None:
    """Ask again at the next use: after a migration or a flush. Affects the calling thread."""
    _facts.by_wrapper.clear()
