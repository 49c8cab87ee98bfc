"""Execute a statement of the ledger without a cursor of Django, if no other code watches the statements.

A cursor of Django and the cursor of psycopg below it take more CPU in the client than the statement takes in the
server. If the application has execute wrappers, or if Django logs the queries, Django executes the statement.

See decision 201.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, pq

from outbox.broker.database.sender import Row, can_send, prepared_on, send_one, send_text
from outbox.broker.database.statement import UUID_, Statement
from outbox.contrib.django.database.transactions import is_watched, watch_of

# The statements of this module name no schema.
_NO_SCHEMA: Final = "public"
IDLE: Final = pq.TransactionStatus.IDLE
_BEGIN: Final = Statement("BEGIN")


def begin(raw: Connection[Any]) -> None:
    """Begin the transaction of an open block that has executed no statement, as psycopg would do now.

    The next statements then need no cursor of psycopg. If BEGIN needs options, or in a pipeline, psycopg has to send
    it. Raises psycopg.Error.
    """
    if (
        not raw.autocommit
        and not raw.pgconn.pipeline_status
        and (raw.isolation_level, raw.read_only, raw.deferrable) == (None, None, None)
    ):
        send_text(raw, _BEGIN.text.encode(), _BEGIN)


def rows_of(connection: BaseDatabaseWrapper, statement: Statement, ids: UUID | list[UUID]) -> list[Row]:
    """Execute a statement whose only parameter is an id or a list of ids on PostgreSQL, and return its rows.

    The watch of the connection (BlockWatch) sees the statement. A statement with one id is prepared where that is safe,
    because planning it takes the server longer than executing it. Raises the errors of a cursor of Django.
    """
    watch = watch_of(connection)
    raw = connection.connection
    text = statement.text
    is_ours = isinstance(raw, Connection) and not is_watched(connection, watch)
    if is_ours and connection.in_atomic_block and raw.pgconn.transaction_status == IDLE:
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
            return send_text(raw, text.replace("$1", _constant(ids)).encode(), statement)

    connection.validate_thread_sharing()
    if watch.traces is None:
        watch.note_own(text)
        return execute()
    rows: list[Row] = watch(execute, text, [ids], False, {})
    return rows


def _constant(ids: UUID | list[UUID]) -> str:
    # An id as a number in hexadecimal digits needs no quoting.
    if isinstance(ids, UUID):
        return f"'{ids.int:032x}'::uuid"
    return "'{" + ",".join(f"{one.int:032x}" for one in ids) + "}'::uuid[]"
