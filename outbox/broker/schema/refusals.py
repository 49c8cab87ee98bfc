"""Turn errors of the broker's database into errors that name the failed operation, the reason and the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg import errors as pg

from outbox.errors import BrokerError, BrokerUnavailable, ConfigurationError, OutboxError, SchemaError

_NOT_THERE: Final = (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction, pg.InvalidSchemaName)
_FULL: Final = (pg.DiskFull, pg.OutOfMemory, pg.TooManyConnections)


@contextmanager
def naming(what: str, schema: str) -> Iterator[None]:
    """Raise each error of the driver as an outbox error; `what` names the operation that failed."""
    try:
        yield
    except psycopg.Error as error:
        raise refused(what, error, schema) from error


def next_step(error: Exception) -> str:
    """Return the end of a worker's log line if `error` says that a right is missing; '' for other errors."""
    if not isinstance(error, pg.InsufficientPrivilege):
        return ""
    return " (`manage.py outbox_doctor --for work`, with the worker's login, names the missing rights)"


def refused(what: str, error: psycopg.Error, schema: str) -> OutboxError:
    said = error.diag.message_primary or str(error).strip()
    if isinstance(error, _NOT_THERE):
        return SchemaError(
            f"{what}: not done, the broker's tables in schema {schema!r} are not as they were installed ({said}). "
            f"If all are missing, correct the connection or run `manage.py migrate --database=ALIAS`. If only some "
            f"are missing or changed, restore the database from a backup (docs/operations/restore.md#restore)."
        )
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return BrokerUnavailable(
            f"{what}: not done, the broker's database is read-only (a replica, its disk is nearly full, or the login "
            f"has default_transaction_read_only). Nothing was stored. Connect to the primary server, as a login that "
            f"may write."
        )
    if isinstance(error, pg.InsufficientPrivilege):
        return ConfigurationError(
            f"{what}: not done, the role of the broker's alias lacks a right in schema {schema!r}: {said}. `manage.py "
            f"outbox_doctor --for publish` (or work, watch, own) names the missing rights and the statements that "
            f"grant them. If this login shall not have them, use the login of a worker for this."
        )
    if isinstance(error, (pg.LockNotAvailable, pg.QueryCanceled)):
        return BrokerUnavailable(
            f"{what}: not done, {said} (lock_timeout, statement_timeout, or cancelled by another session). Nothing was "
            f"stored. Try again; if that does not help, raise the timeout."
        )
    if isinstance(error, _FULL):
        return BrokerUnavailable(
            f"{what}: not done, the server of the broker's database is short of disk, memory or connections "
            f"({said}). Nothing was stored. Free or add capacity, then try again."
        )
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return BrokerUnavailable(
            f"{what}: interrupted, the connection to the broker's database broke: {said}. The server may have "
            "completed the operation: check the result before you try again."
        )
    return BrokerError(
        f"{what}: not done, the broker's database raised an error: {said}. Nothing was stored. Remove the cause, "
        "then try again."
    )
