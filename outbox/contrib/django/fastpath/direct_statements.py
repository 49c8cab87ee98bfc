"""Execute a statement of the ledger without a cursor of Django, if no other code watches the statements.

A cursor of Django and the cursor of psycopg below it take more CPU in the client than the statement takes in the
server. If the application has execute wrappers, or if Django logs the queries, Django executes the statement.

See decision 201.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, LiteralString
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection

from outbox.broker.fastpath.direct import (
    UUID_,
    Row,
    Type,
    TypedStatement,
    can_send,
    may_prepare,
    simple_rows,
    typed_rows,
)

# The statements of this module name no schema.
_NO_SCHEMA: Final = "public"


def rows_of(
    connection: BaseDatabaseWrapper,
    watch: Callable[..., Any],
    sql: LiteralString,
    ids: UUID | list[UUID],
    columns: tuple[Type, ...],
) -> list[Row]:
    """Execute a statement whose only parameter (`%s`) is an id or a list of ids on PostgreSQL, and return its rows.

    `watch` is the execute wrapper of this package on the connection; it sees the statement. A statement with one id is
    prepared where that is safe, because planning it takes the server longer than executing it.
    Raises the errors of a cursor of Django.
    """
    raw = connection.connection
    is_watched = connection.execute_wrappers != [watch] or connection.queries_logged
    if is_watched or not isinstance(raw, Connection) or not can_send(raw):
        with connection.cursor() as cursor:
            cursor.execute(sql, [ids])
            found: list[Row] = cursor.fetchall()
        return found
    # An id as a number in hexadecimal digits needs no quoting.
    constant = (
        "'{" + ",".join(f"{one.int:032x}" for one in ids) + "}'::uuid[]"
        if isinstance(ids, list)
        else f"'{ids.int:032x}'::uuid"
    )

    def execute(*_: Any) -> list[Row]:
        connection.validate_no_broken_transaction()
        with connection.wrap_database_errors:
            if isinstance(ids, UUID) and may_prepare(raw):
                typed = _typed(sql, columns)
                return typed_rows(raw, typed, [ids], typed.on(_NO_SCHEMA))
            return simple_rows(raw, sql.replace("%s", constant).encode(), columns)

    connection.validate_thread_sharing()
    rows: list[Row] = watch(execute, sql, [ids], False, {})
    return rows


@functools.cache
def _typed(sql: LiteralString, columns: tuple[Type, ...]) -> TypedStatement:
    return TypedStatement(sql.replace("%s", "$1"), (UUID_,), columns)
