"""Execute one statement whose types are known, without a cursor of psycopg.

psycopg finds out the type of each value on each execution, and often leaves the type to the server. Here the statement
declares its types. The client sends the values in binary form with these types, so the client and the server take less
CPU. The waiting is psycopg's own: deadlines, signals and notifications work as with a cursor.

See decision 201.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, LiteralString

import psycopg
from psycopg import generators
from psycopg.errors import InvalidSqlStatementName, error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from outbox.broker.database.connection import BrokerConnection, Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement, new_statement_name
from outbox.broker.fastpath import switch

Row = tuple[Any, ...]

# The name under which a connection keeps the cursor of `_by_cursor`, and the encoding that the cursor uses.
_KEPT: Final = "_outbox_cursor"
# The name under which a connection keeps the names of its prepared statements, by the statement's text. The value is
# None after a prepared statement was missing: the connection then prepares nothing more.
_PREPARED: Final = "_outbox_prepared"
# The name under which a connection of the application keeps whether it leads straight to its server.
_DIRECT: Final = "_outbox_direct"
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_ENCODING: Final = b"UTF8"
_IDLE: Final = TransactionStatus.IDLE
_IN_TRANSACTION: Final = TransactionStatus.INTRANS
# The errors of a value that does not have the declared type. psycopg then sends the value.
_OTHER_TYPE: Final = (TypeError, ValueError, AttributeError, OverflowError, struct.error)


@dataclass(frozen=True, slots=True)
class Type:
    """A type of PostgreSQL: its oid, the binary form of a value, and the value of a text form."""

    oid: int
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]


def _no_load(_: bytes) -> Any:
    raise NotImplementedError


def _no_dump(_: Any) -> bytes:
    raise NotImplementedError


def _dump_time(moment: datetime) -> bytes:
    return struct.pack("!q", (moment - _EPOCH) // _MICROSECOND)


BOOLEAN: Final = Type(16, struct.Struct("?").pack, b"t".__eq__)
BYTEA: Final = Type(17, bytes, _no_load)
BIGINT: Final = Type(20, struct.Struct("!q").pack, int)
INTEGER: Final = Type(23, struct.Struct("!i").pack, int)
TEXT: Final = Type(25, str.encode, bytes.decode)
OID: Final = Type(26, struct.Struct("!I").pack, int)
FLOAT8: Final = Type(701, struct.Struct("!d").pack, float)
TIMESTAMPTZ: Final = Type(1184, _dump_time, _no_load)
NUMERIC: Final = Type(1700, _no_dump, lambda text: Decimal(text.decode()))
UUID_: Final = Type(2950, lambda value: value.bytes, lambda text: uuid.UUID(text.decode()))


class TypedStatement(Statement):
    """A statement that declares the types of its parameters and of the columns of its rows."""

    __slots__ = ("dumps", "formats", "loads", "oids")

    def __init__(self, text: LiteralString, parameters: Sequence[Type], columns: Sequence[Type]) -> None:
        super().__init__(text)
        self.oids = [parameter.oid for parameter in parameters]
        self.formats = [Format.BINARY] * len(parameters)
        self.dumps = [parameter.dump for parameter in parameters]
        self.loads = [column.load for column in columns]

    def dumped(self, values: Sequence[Any]) -> list[bytes | None] | None:
        """Return the binary forms of the values; None if a value does not have the declared type."""
        try:
            return [None if value is None else dump(value) for dump, value in zip(self.dumps, values, strict=True)]
        except _OTHER_TYPE:
            return None


def first_row(run: Executor, statement: TypedStatement, values: Sequence[Any]) -> Row | None:
    """Execute a statement with numbered parameters on a hot path, and return its first row.

    The statement is prepared on a direct connection of the broker. On other connections, psycopg prepares it if the
    connection's `prepare_threshold` is set. Raises psycopg.Error.
    """
    connection = run.connection
    if can_send(connection) and (connection.prepare_threshold is None or isinstance(connection, BrokerConnection)):
        dumped = statement.dumped(values)
        if dumped is not None:
            rows = _rows(connection, statement, dumped, statement.numbered(run.schema)[0])
            return rows[0] if rows else None
    return _by_cursor(connection, statement.on(run.schema), values)


def note_backend(connection: object, pid: int) -> None:
    """Note the id of the server process that has executed a statement of the application's connection.

    A pooler reports another id to the client, and may use another session for the next transaction.
    """
    if isinstance(connection, psycopg.Connection):
        vars(connection)[_DIRECT] = pid == connection.pgconn.backend_pid


def may_prepare(connection: Connection) -> bool:
    """Whether a statement of this module may be prepared now. The caller has checked that `can_send` is true.

    Prepared statements are used only on a connection without a pooler, and outside of a transaction, because the error
    of a missing prepared statement would abort the transaction. psycopg, too, may deallocate all prepared statements of
    a connection, after a ROLLBACK, if it prepares statements itself.
    """
    if connection.pgconn.transaction_status != _IDLE:
        return False
    kept = vars(connection)
    if isinstance(connection, BrokerConnection):
        is_direct = connection.is_direct
    else:
        is_direct = connection.prepare_threshold is None and kept.get(_DIRECT, False)
    return is_direct and kept.setdefault(_PREPARED, {}) is not None


def typed_rows(connection: Connection, statement: TypedStatement, values: Sequence[Any], text: bytes) -> list[Row]:
    """Execute one statement, prepared if `may_prepare` is true, and return its rows.

    The caller has checked that `can_send` is true. Raises TypeError for a value of another type, and psycopg.Error.
    """
    dumped = statement.dumped(values)
    if dumped is None:
        raise TypeError(f"the values {values!r} do not have the types of the statement")
    return _rows(connection, statement, dumped, text)


def simple_rows(connection: Connection, text: bytes, columns: Sequence[Type]) -> list[Row]:
    """Execute one statement without parameters by the simple query protocol, and return its rows.

    The caller has checked that `can_send` is true. Raises psycopg.Error.
    """
    with connection.lock:
        connection.pgconn.send_query(text)
        return _loaded(_result(connection), [column.load for column in columns])


def can_send(connection: Connection) -> bool:
    """Whether this module may send a statement now. If not, psycopg has to send it.

    psycopg has to send the statement in these cases: a pipeline is open, psycopg would first send BEGIN, the session
    has another client encoding than UTF-8, the connection is closed, or the fast paths are off.
    """
    pgconn = connection.pgconn
    status = pgconn.transaction_status
    return (
        switch.enabled
        and (status == _IN_TRANSACTION or (status == _IDLE and connection.autocommit))
        and not pgconn.pipeline_status
        and pgconn.parameter_status(b"client_encoding") == _ENCODING
    )


def _rows(connection: Connection, statement: TypedStatement, values: list[bytes | None], text: bytes) -> list[Row]:
    if may_prepare(connection):
        try:
            return _executed(connection, statement, values, text, prepare=True)
        except InvalidSqlStatementName:
            vars(connection)[_PREPARED] = None
    return _executed(connection, statement, values, text, prepare=False)


def _executed(
    connection: Connection, statement: TypedStatement, values: list[bytes | None], text: bytes, *, prepare: bool
) -> list[Row]:
    pgconn = connection.pgconn
    with connection.lock:
        if prepare:
            names: dict[bytes, bytes] = vars(connection)[_PREPARED]
            name = names.get(text)
            if name is None:
                name = new_statement_name()
                pgconn.send_prepare(name, text, statement.oids)
                _result(connection)
                names[text] = name
            pgconn.send_query_prepared(name, values, statement.formats)
        else:
            pgconn.send_query_params(text, values, statement.oids, statement.formats)
        result = _result(connection)
    return _loaded(result, statement.loads)


def _loaded(result: PGresult, loads: Sequence[Callable[[bytes], Any]]) -> list[Row]:
    columns = list(enumerate(loads))
    return [
        tuple([None if (value := result.get_value(row, column)) is None else load(value) for column, load in columns])
        for row in range(result.ntuples)
    ]


def _result(connection: Connection) -> PGresult:
    result: PGresult = connection.wait(generators.execute(connection.pgconn))[-1]
    if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        raise error_from_result(result, encoding="utf-8")
    return result


def _by_cursor(connection: Connection, text: bytes, values: Sequence[Any]) -> Row | None:
    kept = vars(connection)
    # A cursor that executes the same statement again keeps psycopg's choices of dumpers and loaders. Without the kept
    # cursor, a call takes 10 to 20 µs more CPU. The cursor is taken out while it works, so no second thread uses it,
    # and after an error it is not used again. A kept cursor would ignore a new client_encoding.
    encoding = connection.pgconn.parameter_status(b"client_encoding")
    cursor, of_encoding = kept.pop(_KEPT, (None, None))
    if cursor is None or encoding != of_encoding:
        cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
        cursor.format = Format.BINARY
    row: Row | None = cursor.execute(text, values, prepare=True).fetchone()
    kept[_KEPT] = cursor, encoding
    return row
