"""The statements of the ledger (tables outbox_ledger, outbox_ledger_identity); the caller passes the connection.

The plain INSERTs are the barrier: for one transaction, the ledger has either the local transaction's row 'C' or the
check-back's row 'R', never both rows.

See decision 029.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError
from psycopg import Connection, pq

from outbox.broker.database.arrays import UUIDS
from outbox.broker.database.sender import Row, begin, can_send, note_backend, prepared_on, send_one, send_text
from outbox.broker.database.statement import INTEGER, OID, TEXT, UUID_, Statement
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.columns import read_uuid, stored_uuid
from outbox.contrib.django.database.transactions import watch_of

TABLE: Final = "outbox_ledger"
# The statements of this module name no schema.
_NO_SCHEMA: Final = "public"
_IDLE: Final = pq.TransactionStatus.IDLE
COMMITTED: Final = "C"
ROLLED_BACK: Final = "R"

# This list length is below the parameter limit of every database that Django supports.
_LARGEST_LIST: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The id of a database's ledger, and the transaction id below which rows may be missing."""

    ledger_id: UUID
    pruned_before: UUID | None


@dataclass(frozen=True, slots=True)
class LedgerWrite:
    """The place of a local transaction's ledger row.

    `xid`: the database's own id of the local transaction, which `is_rolled_back` uses later; '' if the database has no
    such id. `ledger_id`: the id of the ledger; None if the row with the id is missing. `table_oid`: on
    PostgreSQL the oid of the ledger's table, because the search path chooses the table.
    """

    xid: str
    ledger_id: UUID | None
    table_oid: int | None = None


def _rows_of(connection: BaseDatabaseWrapper, statement: Statement, ids: UUID | list[UUID]) -> list[Row]:
    """Execute a statement whose only parameter is an id or a list of ids on PostgreSQL, and return its rows.

    It needs no cursor of Django, unless other code watches the statements: a cursor of Django and the cursor of psycopg
    below it take more CPU in the client than the statement takes in the server (decision 201).
    The watch of the connection (BlockWatch) sees the statement. A statement with one id is prepared where that is safe,
    because planning it takes the server longer than executing it. Raises the errors of a cursor of Django.
    """
    watch = watch_of(connection)
    raw = connection.connection
    text = statement.text
    # `is_watched`, without its call.
    is_ours = isinstance(raw, Connection) and len(connection.execute_wrappers) == 1 and not connection.queries_logged
    if is_ours and connection.in_atomic_block and raw.pgconn.transaction_status == _IDLE:
        with connection.wrap_database_errors:
            begin(raw)
    if not is_ours or not can_send(raw):
        with connection.cursor() as cursor:
            cursor.execute(text.replace("$1", "%s"), [ids])
            found: list[Row] = cursor.fetchall()
        return found

    def execute(*_: Any) -> list[Row]:
        connection.validate_no_broken_transaction()
        with connection.wrap_database_errors:
            if isinstance(ids, UUID) and prepared_on(raw) is not None:
                return send_one(raw, _NO_SCHEMA, statement, [UUID_.dump(ids)])
            # An id as a number in hexadecimal digits needs no quoting.
            if isinstance(ids, UUID):
                constant = f"'{ids.int:032x}'::uuid"
            else:
                constant = "'{" + ",".join(f"{one.int:032x}" for one in ids) + "}'::uuid[]"
            return send_text(raw, text.replace("$1", constant).encode(), statement)

    connection.validate_thread_sharing()
    if watch.traces is None:
        watch.note_own(text)
        return execute()
    rows: list[Row] = watch(execute, text, [ids], False, {})
    return rows


_INSERT_COMMITTED: Final = "INSERT INTO outbox_ledger (transaction_id, state) VALUES (%s, 'C')"

_SELECT_LEDGER_ID: Final = "SELECT ledger_id FROM outbox_ledger_identity"

_INSERT_COMMITTED_MARIADB: Final = f"{_INSERT_COMMITTED} RETURNING ({_SELECT_LEDGER_ID})"

# This is one statement, so that the same search path finds the row's table and the identity's table.
_INSERT_COMMITTED_POSTGRESQL: Final = Statement(
    """
INSERT INTO outbox_ledger (transaction_id, state) VALUES ($1, 'C')
RETURNING pg_current_xact_id()::text, (SELECT ledger_id FROM outbox_ledger_identity), tableoid, pg_backend_pid()
""",
    (UUID_,),
    (TEXT, UUID_, OID, INTEGER),
)


def insert_committed(connection: BaseDatabaseWrapper, transaction_id: UUID) -> LedgerWrite:
    """Write the row of the open local transaction on `connection`, and return its place.

    Raises IntegrityError if the ledger has a tombstone of the transaction.
    """
    if connection.vendor == "postgresql":
        [(*place, pid)] = _rows_of(connection, _INSERT_COMMITTED_POSTGRESQL, transaction_id)
        note_backend(connection.connection, pid)
        return LedgerWrite(*place)
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute(_INSERT_COMMITTED_MARIADB, [stored_uuid(connection, transaction_id)])
        else:
            cursor.execute(_INSERT_COMMITTED, [stored_uuid(connection, transaction_id)])
            cursor.execute(_SELECT_LEDGER_ID)
        row = cursor.fetchone()
        return LedgerWrite(xid="", ledger_id=None if row is None or row[0] is None else read_uuid(row[0]))


_CURRENT_XID: Final = "SELECT pg_current_xact_id()::text"


def current_xid(connection: BaseDatabaseWrapper) -> str:
    """The id of the open transaction. PostgreSQL only."""
    with connection.cursor() as cursor:
        cursor.execute(_CURRENT_XID)
        return str(cursor.fetchone()[0])


# A load balancer or pooler may lead to a replica. A replica may not have received the commit yet, so its answer proves
# nothing.
_COMMITTED: Final = "SELECT transaction_id FROM outbox_ledger WHERE state = 'C' AND NOT pg_is_in_recovery()"
_COMMITTED_ONE: Final = Statement(f"{_COMMITTED} AND transaction_id = $1", (UUID_,), (UUID_,))
_COMMITTED_POSTGRESQL: Final = Statement(f"{_COMMITTED} AND transaction_id = ANY ($1)", (UUIDS,), (UUID_,))


def committed(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID]) -> set[UUID]:
    """The transactions whose row 'C' is visible on `connection`.

    A transaction that is not returned may also have committed. The transaction that wrote a row sees the row before the
    commit. Every other transaction sees only committed rows.
    """
    if connection.vendor != "postgresql":
        return {value for value, state in states(connection, transaction_ids).items() if state == COMMITTED}
    if len(transaction_ids) == 1:
        rows = _rows_of(connection, _COMMITTED_ONE, transaction_ids[0])
    else:
        rows = _rows_of(connection, _COMMITTED_POSTGRESQL, list(transaction_ids))
    return {row[0] for row in rows}


# The statement returns true in two cases: the whole transaction was aborted, or the transaction is still open and the
# rollback of a savepoint removed the row.
_ROLLED_BACK_POSTGRESQL: Final = """
SELECT NOT pg_is_in_recovery()
   AND (pg_xact_status(%(xid)s::xid8) = 'aborted'
        OR (pg_current_xact_id_if_assigned() = %(xid)s::xid8
            AND NOT EXISTS (SELECT FROM outbox_ledger WHERE transaction_id = %(transaction_id)s)))
"""


def is_rolled_back(connection: BaseDatabaseWrapper, transaction_id: UUID, xid: str) -> bool:
    """Whether it is certain that the local transaction can never commit its ledger row.

    `connection` must reach the database that wrote the row.

    PostgreSQL reports how the transaction `xid` (from `insert_committed`) ended. SQLite has one file and one writer: if
    the writing connection does not see the row, the row no longer exists. On other databases, and in case of doubt, the
    function returns False.
    """
    if connection.vendor == "sqlite":
        return not states(connection, [transaction_id])
    if connection.vendor != "postgresql" or not xid:
        return False
    with connection.cursor() as cursor:
        cursor.execute(_ROLLED_BACK_POSTGRESQL, {"xid": xid, "transaction_id": transaction_id})
        return bool(cursor.fetchone()[0])


# The INSERT itself reads the identity. So if the ledger was emptied or pruned after the checker had read the identity,
# the INSERT writes no tombstone.
_INSERT_TOMBSTONE: Final = """
INSERT INTO outbox_ledger (transaction_id, state)
SELECT %s, 'R' FROM outbox_ledger_identity
WHERE ledger_id = %s AND (pruned_before IS NULL OR pruned_before <= %s)
"""


def insert_tombstone(connection: BaseDatabaseWrapper, transaction_id: UUID, *, ledger_id: UUID) -> bool:
    """Write a tombstone, so that a late row 'C' fails. Returns whether the tombstone was written.

    The tombstone is written only if the ledger still has this `ledger_id`, and is complete for the transaction's id.

    Raises IntegrityError if the ledger already has a row of the transaction, or OperationalError if the statement would
    have to wait for a lock.
    """
    value = stored_uuid(connection, transaction_id)
    with connection.cursor() as cursor:
        cursor.execute(_INSERT_TOMBSTONE, [value, stored_uuid(connection, ledger_id), value])
        return bool(cursor.rowcount == 1)


# PostgreSQL before version 17 has no transaction_timeout.
_LIFT_TIMEOUTS: Final = """
SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN %s WHEN 'statement_timeout' THEN %s ELSE '0' END, true)
FROM unnest(ARRAY['statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout'])
     AS name
WHERE current_setting(name, true) IS NOT NULL
"""


@contextmanager
def without_timeouts(connection: BaseDatabaseWrapper, *, lock_timeout_milliseconds: int = 0) -> Iterator[None]:
    """On PostgreSQL, a transaction without the timeouts of the role and the database.

    On other databases, this function does nothing.

    In a request of the operations page, the deadline of the request sets the timeouts (database/deadline.py). If
    `connection` is not in an atomic block, this function begins and ends the transaction. The settings end with the
    transaction, so a pooler's next client does not get them.
    """
    if connection.vendor != "postgresql":
        yield
        return
    limits = deadline.limits() or {"lock": "0", "statement": "0"}
    settings = [str(lock_timeout_milliseconds or limits["lock"]), limits["statement"]]
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


# The ids are sorted, because two checkers that insert in different orders would wait for each other.
_INSERT_TOMBSTONES_POSTGRESQL: Final = """
INSERT INTO outbox_ledger (transaction_id, state)
SELECT transaction_id, 'R'
FROM outbox_ledger_identity, unnest(%s::uuid[]) AS transaction_id
WHERE ledger_id = %s AND (pruned_before IS NULL OR pruned_before <= transaction_id)
ORDER BY transaction_id
RETURNING transaction_id
"""


def insert_tombstones(
    connection: BaseDatabaseWrapper,
    transaction_ids: Sequence[UUID],
    *,
    ledger_id: UUID,
    lock_timeout_milliseconds: int,
) -> set[UUID]:
    """Write the tombstones of all ids for which this ledger is complete, and return these ids. PostgreSQL only.

    If the function raises an error (the errors of `insert_tombstone`), no tombstone is written.
    """
    with (
        without_timeouts(connection, lock_timeout_milliseconds=lock_timeout_milliseconds),
        connection.cursor() as cursor,
    ):
        cursor.execute(_INSERT_TOMBSTONES_POSTGRESQL, [sorted(transaction_ids), ledger_id])
        return {row[0] for row in cursor.fetchall()}


_SELECT_STATES: Final = "SELECT transaction_id, state FROM outbox_ledger WHERE transaction_id IN "


def states(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID]) -> dict[UUID, str]:
    """The states of those transactions that have a ledger row, by id."""
    found: dict[UUID, str] = {}
    with connection.cursor() as cursor:
        for part in _parts(transaction_ids):
            cursor.execute(_SELECT_STATES + _places(len(part)), [stored_uuid(connection, value) for value in part])
            found.update((read_uuid(value), state) for value, state in cursor.fetchall())
    return found


_SELECT_IDENTITY: Final = "SELECT ledger_id, pruned_before FROM outbox_ledger_identity"


def identity(connection: BaseDatabaseWrapper) -> Identity | None:
    """The identity of the ledger, or None if its row is missing (the database was flushed)."""
    with connection.cursor() as cursor:
        cursor.execute(_SELECT_IDENTITY)
        row = cursor.fetchone()
    if row is None:
        return None
    return Identity(ledger_id=read_uuid(row[0]), pruned_before=None if row[1] is None else read_uuid(row[1]))


_SELECT_REACHED: Final = "SELECT 'outbox_ledger'::regclass::oid, ledger_id FROM outbox_ledger_identity"


def reached(connection: BaseDatabaseWrapper) -> tuple[int, UUID] | None:
    """The table and the identity of the ledger that the connection's search path finds. PostgreSQL only."""
    with connection.cursor() as cursor:
        cursor.execute(_SELECT_REACHED)
        row: tuple[int, UUID] | None = cursor.fetchone()
        return row


_READ_ONLY: Final = {
    "postgresql": "SELECT current_setting('transaction_read_only') = 'on'",
    "mysql": "SELECT @@global.read_only",
}


def is_read_only(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection reaches a replica.

    A replica must not answer a check, because it may not have received a commit yet.
    """
    statement = _READ_ONLY.get(connection.vendor)
    if statement is None:
        return False
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return bool(cursor.fetchone()[0])


_SELECT_BETWEEN: Final = """
SELECT transaction_id FROM outbox_ledger WHERE transaction_id > %s AND transaction_id < %s ORDER BY transaction_id
"""


def ids_between(connection: BaseDatabaseWrapper, after: UUID, below: UUID, *, limit: int) -> list[UUID]:
    """The next transaction ids of the ledger between `after` and `below` (both exclusive), in order."""
    with connection.cursor() as cursor:
        statement = f"{_SELECT_BETWEEN} {connection.ops.limit_offset_sql(0, limit)}"
        cursor.execute(statement, [stored_uuid(connection, after), stored_uuid(connection, below)])
        return [read_uuid(row[0]) for row in cursor.fetchall()]


_SELECT_COMMITTED: Final = """
SELECT transaction_id FROM outbox_ledger WHERE transaction_id > %s AND state = 'C' ORDER BY transaction_id
"""


def committed_after(connection: BaseDatabaseWrapper, after: UUID, *, limit: int) -> list[UUID]:
    """The next committed transactions after the id `after`, in the order of their ids."""
    with connection.cursor() as cursor:
        statement = f"{_SELECT_COMMITTED} {connection.ops.limit_offset_sql(0, limit)}"
        cursor.execute(statement, [stored_uuid(connection, after)])
        return [read_uuid(row[0]) for row in cursor.fetchall()]


_ADVANCE_PRUNED: Final = """
UPDATE outbox_ledger_identity SET pruned_before = %s WHERE pruned_before IS NULL OR pruned_before < %s
"""


def advance_pruned_before(connection: BaseDatabaseWrapper, below: UUID) -> None:
    """Record that rows of transactions below this id may be missing. The recorded id never decreases."""
    value = stored_uuid(connection, below)
    with connection.cursor() as cursor:
        cursor.execute(_ADVANCE_PRUNED, [value, value])


_DELETE: Final = "DELETE FROM outbox_ledger WHERE transaction_id IN "

# The ids of a batch are adjacent. The statement contains the batch's first and last id, so the planner does not read
# the whole table.
_DELETE_POSTGRESQL: Final = """
DELETE FROM outbox_ledger USING unnest(%s::uuid[]) AS gone (id)
WHERE transaction_id = gone.id AND transaction_id BETWEEN %s AND %s
"""


def delete(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID]) -> int:
    if not transaction_ids:
        return 0
    deleted = 0
    with without_timeouts(connection), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            bounds = [min(transaction_ids), max(transaction_ids)]
            cursor.execute(_DELETE_POSTGRESQL, [list(transaction_ids), *bounds])
            return int(cursor.rowcount)
        for part in _parts(transaction_ids):
            cursor.execute(_DELETE + _places(len(part)), [stored_uuid(connection, value) for value in part])
            deleted += cursor.rowcount
    return deleted


def _parts(values: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
    for start in range(0, len(values), _LARGEST_LIST):
        yield values[start : start + _LARGEST_LIST]


def _places(count: int) -> str:
    return f"({', '.join(['%s'] * count)})"
