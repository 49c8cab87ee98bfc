"""The statements of the ledger (tables outbox_ledger, outbox_ledger_identity), the connection passed in.

The plain INSERTs are the barrier: of a local transaction's 'C' and a check-back's 'R' only one can exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError

COMMITTED: Final = "C"
ROLLED_BACK: Final = "R"

# Fits the parameter limit of every database Django supports.
_LARGEST_LIST: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which ledger a database holds, and below which transaction id rows may be missing."""

    ledger_id: UUID
    pruned_before: UUID | None


_INSERT_COMMITTED: Final = "INSERT INTO outbox_ledger (transaction_id, state) VALUES (%s, 'C')"

# A row written inside a savepoint carries the subtransaction's id: only such a row can go while the rest commits.
_INSERT_COMMITTED_POSTGRESQL: Final = """
INSERT INTO outbox_ledger (transaction_id, state) VALUES (%s, 'C')
RETURNING xmin <> pg_current_xact_id()::xid
"""


def insert_committed(connection: BaseDatabaseWrapper, transaction_id: UUID) -> bool:
    """Write the row of the local transaction that is open on `connection`.

    Returns whether the row can still be rolled back while that transaction commits, because it was (or, where the
    database cannot tell, may have been) written inside a savepoint. Raises IntegrityError if a tombstone is there.
    """
    with connection.cursor() as cursor:
        if connection.vendor != "postgresql":
            cursor.execute(_INSERT_COMMITTED, [_stored(connection, transaction_id)])
            return True
        cursor.execute(_INSERT_COMMITTED_POSTGRESQL, [transaction_id])
        return bool(cursor.fetchone()[0])


_INSERT_TOMBSTONE: Final = "INSERT INTO outbox_ledger (transaction_id, state) VALUES (%s, 'R')"


def insert_tombstone(connection: BaseDatabaseWrapper, transaction_id: UUID) -> None:
    """Make a late local transaction collide. Raises IntegrityError or, when it would have to wait, OperationalError."""
    with connection.cursor() as cursor:
        cursor.execute(_INSERT_TOMBSTONE, [_stored(connection, transaction_id)])


# transaction_timeout came with PostgreSQL 17.
_LIFT_TIMEOUTS: Final = """
SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN %s ELSE '0' END, true)
FROM unnest(ARRAY['statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout'])
     AS name
WHERE current_setting(name, true) IS NOT NULL
"""


@contextmanager
def without_timeouts(connection: BaseDatabaseWrapper, *, lock_timeout_milliseconds: int = 0) -> Iterator[None]:
    """On PostgreSQL, a transaction that no timeout of role or database cuts short; elsewhere nothing.

    It begins one unless `connection`, which is the caller's own, is in an atomic block. The settings end with the
    transaction: right behind a pooler too.
    """
    if connection.vendor != "postgresql":
        yield
        return
    settings = [str(lock_timeout_milliseconds)]
    with connection.cursor() as cursor:
        if connection.in_atomic_block:
            cursor.execute(_LIFT_TIMEOUTS, settings)
            yield
            return
        cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            cursor.execute(_LIFT_TIMEOUTS, settings)
            yield
        except BaseException:
            with suppress(DatabaseError):
                cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")


# Sorted, because two checkers inserting in different orders would wait for each other.
_INSERT_TOMBSTONES_POSTGRESQL: Final = """
INSERT INTO outbox_ledger (transaction_id, state)
SELECT transaction_id, 'R' FROM unnest(%s::uuid[]) AS transaction_id ORDER BY transaction_id
"""


def insert_tombstones(
    connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID], *, lock_timeout_milliseconds: int
) -> None:
    """PostgreSQL only: all tombstones or none. Raises like `insert_tombstone`."""
    with (
        without_timeouts(connection, lock_timeout_milliseconds=lock_timeout_milliseconds),
        connection.cursor() as cursor,
    ):
        cursor.execute(_INSERT_TOMBSTONES_POSTGRESQL, [sorted(transaction_ids)])


_SELECT_STATES: Final = "SELECT transaction_id, state FROM outbox_ledger WHERE transaction_id IN "


def states(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID]) -> dict[UUID, str]:
    """The states of those transactions that have a row."""
    found: dict[UUID, str] = {}
    with connection.cursor() as cursor:
        for part in _parts(transaction_ids):
            cursor.execute(_SELECT_STATES + _places(len(part)), [_stored(connection, value) for value in part])
            found.update((_read(value), state) for value, state in cursor.fetchall())
    return found


_SELECT_IDENTITY: Final = "SELECT ledger_id, pruned_before FROM outbox_ledger_identity"


def identity(connection: BaseDatabaseWrapper) -> Identity | None:
    """The identity of the ledger, or None when its row is missing (the database was flushed)."""
    with connection.cursor() as cursor:
        cursor.execute(_SELECT_IDENTITY)
        row = cursor.fetchone()
    if row is None:
        return None
    return Identity(ledger_id=_read(row[0]), pruned_before=None if row[1] is None else _read(row[1]))


_READ_ONLY: Final = "SELECT current_setting('transaction_read_only') = 'on'"


def is_read_only(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection reaches a replica, which must not answer: it may not have seen a commit yet."""
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute(_READ_ONLY)
        return bool(cursor.fetchone()[0])


_SELECT_BETWEEN: Final = """
SELECT transaction_id FROM outbox_ledger WHERE transaction_id > %s AND transaction_id < %s ORDER BY transaction_id
"""


def ids_between(connection: BaseDatabaseWrapper, after: UUID, below: UUID, *, limit: int) -> list[UUID]:
    """The next transaction ids in order, both bounds excluded."""
    with connection.cursor() as cursor:
        statement = f"{_SELECT_BETWEEN} {connection.ops.limit_offset_sql(0, limit)}"
        cursor.execute(statement, [_stored(connection, after), _stored(connection, below)])
        return [_read(row[0]) for row in cursor.fetchall()]


_ADVANCE_PRUNED: Final = """
UPDATE outbox_ledger_identity SET pruned_before = %s WHERE pruned_before IS NULL OR pruned_before < %s
"""


def advance_pruned_before(connection: BaseDatabaseWrapper, below: UUID) -> None:
    """Say that rows of transactions below this id may be missing. Never moves back."""
    value = _stored(connection, below)
    with connection.cursor() as cursor:
        cursor.execute(_ADVANCE_PRUNED, [value, value])


_DELETE: Final = "DELETE FROM outbox_ledger WHERE transaction_id IN "


def delete(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID]) -> int:
    """Remove rows; returns how many there were."""
    deleted = 0
    with without_timeouts(connection), connection.cursor() as cursor:
        for part in _parts(transaction_ids):
            cursor.execute(_DELETE + _places(len(part)), [_stored(connection, value) for value in part])
            deleted += cursor.rowcount
    return deleted


def _stored(connection: BaseDatabaseWrapper, value: UUID) -> Any:
    return value if connection.features.has_native_uuid_field else value.hex


def _read(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


def _parts(values: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
    for start in range(0, len(values), _LARGEST_LIST):
        yield values[start : start + _LARGEST_LIST]


def _places(count: int) -> str:
    return f"({', '.join(['%s'] * count)})"
