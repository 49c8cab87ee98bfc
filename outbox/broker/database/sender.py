"""Send statements with libpq and without a cursor of psycopg, on paths where the client's CPU time matters.

    first_row(run, statement, values)         # one statement
    trip = RoundTrip(connection, schema)      # several statements, which travel together
    trip.send(first, values)
    trip.send(second)
    rows, more_rows = trip.finish()

A statement without an answer that the caller waits for goes by one_way.py. A cursor and a pipeline of psycopg take more
CPU in the client than a small statement takes in the server. A single statement waits as psycopg does, so deadlines,
signals and notifications work as with a cursor. Where this module may not send a statement (`can_send`), and if a value
does not have the declared type, psycopg sends it. See decision 201.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, Protocol

import psycopg
from psycopg import abc
from psycopg.adapt import PyFormat
from psycopg.errors import InvalidSqlStatementName
from psycopg.pq import ConnStatus, ExecStatus, Format, TransactionStatus

from outbox.broker.database.connection import BrokerConnection, Connection
from outbox.broker.database.executor import Executor, cursor_on
from outbox.broker.database.psycopg_internals import (
    PGresult,
    Transformer,
    begin_command,
    error_from_result,
    execute_generator,
)
from outbox.broker.database.statement import Statement, new_statement_name

Row = tuple[Any, ...]

# The name under which a connection keeps its `Session`.
_SESSION: Final = "_outbox_session"
_ENCODING: Final = b"UTF8"
_IDLE: Final = TransactionStatus.IDLE
_IN_TRANSACTION: Final = TransactionStatus.INTRANS
_ANSWERED: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)

# -- the session of a connection -------------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """What is known about the session of a connection.

    `is_direct`: the connection leads to its server without a pooler. `prepared`: the names of the statements that are
    prepared, by their text; None after a prepared statement was missing, because other code deallocates them.
    `is_read_committed`: whether transactions have PostgreSQL's default isolation level; None if it is not known yet.
    `handled_messages`: how many messages of an inbox were handled with prepared statements. `cursors`: the free cursors
    of `_by_cursor`, and the encodings that they use.
    """

    is_direct: bool
    prepared: dict[bytes, bytes] | None = field(default_factory=dict)
    is_read_committed: bool | None = None
    handled_messages: int = 0
    cursors: list[tuple[psycopg.RawCursor[Row], bytes | None]] = field(default_factory=list)


def session_of(connection: Connection) -> Session:
    """Return what is known about the session of a connection."""
    kept = vars(connection)
    session: Session | None = kept.get(_SESSION)
    if session is None:
        session = kept[_SESSION] = Session(isinstance(connection, BrokerConnection) and connection.is_direct)
    return session


def note_backend(connection: object, pid: int) -> None:
    """Note the id of the server process that has executed a statement of the application's connection.

    A pooler reports another id to the client, and may use another session for the next transaction.
    """
    if isinstance(connection, psycopg.Connection):
        session_of(connection).is_direct = pid == connection.pgconn.backend_pid


def prepared_on(connection: Connection) -> dict[bytes, bytes] | None:
    """Return the names of the prepared statements, by their text; None if nothing may be prepared now.

    Statements are prepared only on a connection without a pooler, and outside of a transaction, because the error of a
    missing prepared statement would abort the transaction. If psycopg itself prepares statements of an application, it
    may deallocate all prepared statements of the connection after a ROLLBACK.
    """
    session: Session = vars(connection).get(_SESSION) or session_of(connection)
    if not session.is_direct or connection.pgconn.transaction_status != _IDLE:
        return None
    if not isinstance(connection, BrokerConnection) and connection.prepare_threshold is not None:
        return None
    return session.prepared


def can_send(connection: Connection) -> bool:
    """Whether this module may send a single statement now.

    psycopg has to send it if a pipeline is open, if it would first send BEGIN, if the session has another client
    encoding than UTF-8, or if the connection is closed.
    """
    pgconn = connection.pgconn
    status = pgconn.transaction_status
    return (
        (status == _IN_TRANSACTION or (status == _IDLE and connection.autocommit))
        and not pgconn.pipeline_status
        and pgconn.parameter_status(b"client_encoding") == _ENCODING
    )


# -- one statement ---------------------------------------------------------------------------------


def first_row(run: Executor, statement: Statement, values: Sequence[Any]) -> Row | None:
    """Like `all_rows`, but return the first row, or None."""
    rows = all_rows(run, statement, values)
    return rows[0] if rows else None


def all_rows(run: Executor, statement: Statement, values: Sequence[Any]) -> list[Row]:
    """Execute a statement that declares its types, and return its rows.

    The statement is prepared on a direct connection of the broker. On other connections, psycopg prepares it if the
    connection's `prepare_threshold` is set. Raises psycopg.Error.
    """
    connection = run.connection
    if can_send(connection) and (isinstance(connection, BrokerConnection) or connection.prepare_threshold is None):
        dumped = statement.dumped(values)
        if dumped is not None:
            return send_one(connection, run.schema, statement, dumped)
    return _by_cursor(connection, statement.on(run.schema)[0], values)


def send_one(connection: Connection, schema: str, statement: Statement, dumped: list[bytes | None]) -> list[Row]:
    """Execute one statement with the values of `Statement.dumped`, prepared if that is possible; return its rows.

    The caller has checked that `can_send` is true. Raises psycopg.Error.
    """
    pgconn = connection.pgconn
    text, _ = statement.texts.get(schema) or statement.on(schema)
    if pgconn.transaction_status == _IDLE and (prepared := prepared_on(connection)) is not None:
        try:
            return _by_prepared(connection, statement, dumped, text, prepared)
        except InvalidSqlStatementName:
            session_of(connection).prepared = None
    with connection.lock:
        pgconn.send_query_params(text, dumped, statement.oids, statement.formats)
        result = _result(connection)
    return _loaded(result, statement.loads)


def _by_prepared(
    connection: Connection,
    statement: Statement,
    dumped: list[bytes | None],
    text: bytes,
    prepared: dict[bytes, bytes],
) -> list[Row]:
    pgconn = connection.pgconn
    with connection.lock:
        name = prepared.get(text)
        if name is None:
            name = new_statement_name()
            pgconn.send_prepare(name, text, statement.oids)
            _result(connection)
            prepared[text] = name
        pgconn.send_query_prepared(name, dumped, statement.formats)
        result = _result(connection)
    return _loaded(result, statement.loads)


def send_text(connection: Connection, text: bytes, statement: Statement) -> list[Row]:
    """Execute one statement by the simple query protocol, and return its rows. `text` has the values as constants.

    The caller has checked that `can_send` is true. Raises psycopg.Error.
    """
    with connection.lock:
        connection.pgconn.send_query(text)
        return _loaded(_result(connection), statement.loads)


def begin(connection: Connection) -> None:
    """Begin the transaction of an open block that has executed no statement, as psycopg would do now.

    The next statements then need no cursor of psycopg. In autocommit or in a pipeline, nothing is sent. Raises
    psycopg.Error.
    """
    if not connection.autocommit and not connection.pgconn.pipeline_status:
        with connection.lock:
            connection.pgconn.send_query(begin_command(connection))
            _result(connection)


def _loaded(result: PGresult, loads: Sequence[Callable[[bytes], Any]]) -> list[Row]:
    # Loops instead of comprehensions, each of which is one more call before Python 3.12.
    rows: list[Row] = []
    for row in range(result.ntuples):
        values = []
        for column, load in enumerate(loads):
            value = result.get_value(row, column)
            values.append(None if value is None else load(value))
        rows.append(tuple(values))
    return rows


def _result(connection: Connection) -> PGresult:
    result: PGresult = connection.wait(execute_generator(connection.pgconn))[-1]
    if result.status not in _ANSWERED:
        raise error_from_result(result, encoding="utf-8")
    return result


def _by_cursor(connection: Connection, text: bytes, values: Sequence[Any]) -> list[Row]:
    # A cursor that executes the same statement again keeps psycopg's choices of dumpers and loaders. Without the kept
    # cursor, a call takes 10 to 20 µs more CPU. The cursor is taken out while it works, so no second thread uses it,
    # and after an error it is not used again. A kept cursor would ignore a new client_encoding.
    free = session_of(connection).cursors
    encoding = connection.pgconn.parameter_status(b"client_encoding")
    try:
        cursor, of_encoding = free.pop()
    except IndexError:
        cursor, of_encoding = cursor_on(connection, contains_times=False), encoding
    if encoding != of_encoding:
        cursor = cursor_on(connection, contains_times=False)
    rows: list[Row] = cursor.execute(text, values, prepare=True).fetchall()
    free.append((cursor, encoding))
    return rows


# -- several statements in one round trip ----------------------------------------------------------


@dataclass(slots=True)
class _Prepared:
    """A sent command that prepares the statement `text` under `name`."""

    text: bytes
    name: bytes


# What a sent command waits for: the end of a preparation, or rows, which psycopg converts, or the loaders of the
# columns (none: the rows stay as they are).
_Sent = _Prepared | abc.Transformer | list[Callable[[bytes], Any]]


class RoundTrip:
    """A sender of several statements on one connection, outside psycopg's own pipeline mode. Not thread-safe.

    It uses libpq's pipeline. A statement that declares no types takes and returns values as text: the caller converts
    the few types that it uses. `send_adapted` is for a statement that returns many rows: psycopg converts parameters
    and rows in C.

    `prepared`: the names of the statements that the connection has already prepared, by their text; the object adds the
    statements that it prepares. With None it prepares none, as behind a pooler in transaction mode.
    """

    def __init__(self, connection: Connection, schema: str, *, prepared: dict[bytes, bytes] | None = None) -> None:
        self._connection = connection
        self._schema = schema
        self._prepared = prepared
        self._sent: list[_Sent] = []
        # How many of the sent commands prepare a statement.
        self._preparing = 0
        self._cursor: psycopg.RawCursor[Any] | None = None
        # The adapters of `send_adapted`, by the texts of the statements.
        self._adapters: dict[bytes, abc.Transformer] = {}

    def send(self, statement: Statement, parameters: Mapping[str, Any] | None = None) -> int:
        """Add a statement and return its number. The statement is sent now or, at the latest, by `finish`."""
        text, names = statement.texts.get(self._schema) or statement.on(self._schema)
        values = list(map(parameters.__getitem__, names)) if parameters is not None else []
        types, formats = statement.oids or None, statement.formats or None
        if types is not None:
            values = statement.dumped(values) or statement.dumped_all(values)
        pgconn, sent, prepared = self._connection.pgconn, self._sent, self._prepared
        if not sent:
            pgconn.enter_pipeline_mode()
        if prepared is None:
            pgconn.send_query_params(text, values, types, formats)
        else:
            pgconn.send_query_prepared(prepared.get(text) or self._prepare(text, types), values, formats)
        sent.append(statement.loads)
        return len(sent) - self._preparing - 1

    def send_adapted(self, statement: Statement, parameters: Mapping[str, Any]) -> int:
        """Do the same as `send`, but psycopg converts the parameters and the rows, as a cursor does.

        Raises psycopg.Error if psycopg cannot convert a parameter.
        """
        text, names = statement.texts.get(self._schema) or statement.on(self._schema)
        adapter = self._adapters.get(text)
        if adapter is None:
            # An adapter that is kept keeps psycopg's choices of dumpers and loaders.
            if self._cursor is None:
                self._cursor = cursor_on(self._connection, contains_times=False)
            adapter = self._adapters[text] = Transformer(self._cursor)
        values = adapter.dump_sequence(list(map(parameters.__getitem__, names)), [PyFormat.AUTO] * len(names))
        types, formats = adapter.types, adapter.formats
        pgconn, sent, prepared = self._connection.pgconn, self._sent, self._prepared
        if not sent:
            pgconn.enter_pipeline_mode()
        if prepared is None:
            pgconn.send_query_params(text, values, types, formats, Format.BINARY)
        else:
            name = prepared.get(text) or self._prepare(text, types)
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        sent.append(adapter)
        return len(sent) - self._preparing - 1

    def _prepare(self, text: bytes, types: Sequence[int] | None) -> bytes:
        """Send a statement to be prepared, and return its name."""
        name = new_statement_name()
        self._connection.pgconn.send_prepare(name, text, types)
        self._sent.append(_Prepared(text, name))
        self._preparing += 1
        return name

    def discard_prepared(self) -> None:
        """Deallocate the prepared statements one by one, so that later plans see the current tables."""
        if self._prepared is None:
            return
        pgconn = self._connection.pgconn
        for name in self._prepared.values():
            if not self._sent:
                pgconn.enter_pipeline_mode()
            pgconn.send_query_params(b"DEALLOCATE " + name, [])
            self._sent.append([])
        self._prepared.clear()

    def finish(self) -> list[list[Row]]:
        """Wait for the answers and return the rows of each statement.

        Raises psycopg's error for the first statement that failed: the server executes no later one.
        """
        found, error = self.finish_all()
        if error is not None:
            raise error
        return found

    def finish_all(self) -> tuple[list[list[Row]], psycopg.Error | None]:
        """Like `finish`, but return the rows of the statements before an error, and the error or None."""
        pgconn, sent, self._sent = self._connection.pgconn, self._sent, []
        self._preparing = 0
        pgconn.pipeline_sync()
        rows: list[list[Row]] = []
        error: psycopg.Error | None = None
        for number, result in enumerate(self._results()):
            if result.status not in _ANSWERED:
                error = error or self._error(result)
            elif error is None and number < len(sent):
                one = sent[number]
                if not isinstance(one, _Prepared):
                    rows.append(_rows(result, one) if result.ntuples else [])
                elif self._prepared is not None:
                    self._prepared[one.text] = one.name
        if pgconn.status == ConnStatus.OK:
            pgconn.exit_pipeline_mode()
        return rows, error

    def abandon(self) -> None:
        """Finish the sent statements and ignore their results. An open transaction stays open."""
        if self._sent and self._connection.pgconn.status == ConnStatus.OK:
            self.finish_all()
        self._sent = []
        self._preparing = 0

    def _results(self) -> list[PGresult]:
        """Return all results up to the synchronisation point."""
        pgconn = self._connection.pgconn
        results: list[PGresult] = []
        poll = select.poll()
        poll.register(pgconn.socket, select.POLLIN)
        while pgconn.flush():
            # Read the arriving answers while sending, or client and server could wait for each other.
            poll.modify(pgconn.socket, select.POLLIN | select.POLLOUT)
            poll.poll()
            pgconn.consume_input()
        poll.modify(pgconn.socket, select.POLLIN)
        while True:
            while pgconn.is_busy():
                poll.poll()
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None:
                if result.status == ExecStatus.PIPELINE_SYNC:
                    return results
                results.append(result)
            # libpq returns None after the results of each statement, so None does not end the loop.
            if pgconn.status != ConnStatus.OK:
                return results

    def _error(self, result: PGresult) -> psycopg.Error:
        if self._connection.pgconn.status != ConnStatus.OK:
            return psycopg.OperationalError(self._connection.pgconn.error_message.decode(errors="replace"))
        return error_from_result(result, encoding=self._connection.info.encoding)


def _rows(result: PGresult, sent: abc.Transformer | list[Callable[[bytes], Any]]) -> list[Row]:
    if not isinstance(sent, list):
        sent.set_pgresult(result)
        found: list[Row] = sent.load_rows(0, result.ntuples, tuple)
        # The adapter is kept, the rows are not.
        sent.set_pgresult(None)
        return found
    if sent:
        return _loaded(result, sent)
    columns = range(result.nfields)
    rows: list[Row] = []
    for row in range(result.ntuples):
        rows.append(tuple(map(result.get_value, repeat(row), columns)))
    return rows


class AfterTick(Protocol):
    """A statement of the caller that the server executes after the COMMIT of a tick, in the same round trip.

    The statement sees the entries of the tick. The tick may change nothing.
    """

    def send(self, trip: RoundTrip) -> int | None:
        """Send the statement. Return its number, or None if there is nothing to send."""

    def answered(self, rows: list[Row]) -> None:
        """Take the rows of the statement. The tick has committed. Not called if the tick or the statement failed."""
