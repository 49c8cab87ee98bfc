"""Send several statements together, and read their answers together, for paths on which the client's CPU time matters.

psycopg's pipeline mode takes more CPU in the client than a small statement takes in the server. This module uses
libpq's pipeline directly. Values are sent and returned as text: the caller converts the few types that it uses. For a
statement that returns many rows, psycopg converts the rows (`loads`), because psycopg does this in C. `send_adapted` is
for a statement whose parameters psycopg converts, too.
"""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
from psycopg import abc
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import raw_cursor_on
from outbox.broker.database.statement import Statement, new_statement_name
from outbox.broker.fastpath import switch

# The values are bytes or None, except in the rows that psycopg converts.
Row = tuple[Any, ...]

_ANSWERED: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


def array(values: Sequence[int]) -> bytes:
    """Return the text of an array of integers or transaction ids."""
    return b"{%s}" % ",".join(map(str, values)).encode()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A sent command without its answer.

    `text` and `name` are set if the command prepares a statement. `adapter` is set if psycopg converts the rows.
    """

    text: bytes = b""
    name: bytes = b""
    adapter: abc.Transformer | None = None


class RoundTrip:
    """A sender of statements on one autocommit connection, outside psycopg's own pipeline mode. Not thread-safe.

    `prepare`: whether statements may be prepared; behind a pooler in transaction mode, they may not. `prepared`: the
    statements that the connection has already prepared. If a caller keeps the connection longer than this object, the
    caller passes `prepared`, and the object adds the statements that it prepares.
    """

    def __init__(
        self, connection: Connection, schema: str, *, prepare: bool, prepared: dict[bytes, bytes] | None = None
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._prepares = prepare
        self._prepared = {} if prepared is None else prepared
        self._sent: list[_Sent] = []
        self._cursor: psycopg.RawCursor[Any] | None = None

    def send(
        self, statement: Statement, parameters: Mapping[str, bytes | None] | None = None, *, loads: bool = False
    ) -> int:
        """Add a statement and return its number. The statement is sent now or, at the latest, by `finish`.

        With `loads`, psycopg converts the values of the rows.
        """
        pgconn = self._pipeline()
        text, names = statement.numbered(self._schema)
        values = [parameters[name] for name in names] if parameters is not None else []
        result_format = Format.BINARY if loads else Format.TEXT
        if not self._prepares:
            pgconn.send_query_params(text, values, result_format=result_format)
        else:
            pgconn.send_query_prepared(self._name(text), values, result_format=result_format)
        return self._add(_Sent(adapter=Transformer(self._connection) if loads else None))

    def send_adapted(self, statement: Statement, parameters: Mapping[str, Any]) -> int:
        """Do the same as `send`, but psycopg converts the parameters and the rows, as with `raw_cursor_on`.

        Raises psycopg.Error if psycopg cannot convert a parameter.
        """
        if self._cursor is None:
            self._cursor = raw_cursor_on(self._connection)
        text, names = statement.numbered(self._schema)
        adapter = Transformer(self._cursor)
        values = adapter.dump_sequence([parameters[name] for name in names], [PyFormat.AUTO] * len(names))
        pgconn = self._pipeline()
        if not self._prepares:
            pgconn.send_query_params(text, values, adapter.types, adapter.formats, Format.BINARY)
        else:
            pgconn.send_query_prepared(self._name(text, adapter.types), values, adapter.formats, Format.BINARY)
        return self._add(_Sent(adapter=adapter))

    def _name(self, text: bytes, types: Sequence[int] | None = None) -> bytes:
        """Return the name of the prepared statement. If the statement is not prepared yet, send it to be prepared."""
        name = self._prepared.get(text)
        if name is None:
            name = new_statement_name()
            self._pipeline().send_prepare(name, text, types)
            self._sent.append(_Sent(text, name))
        return name

    def _add(self, sent: _Sent) -> int:
        self._sent.append(sent)
        return sum(not sent.name for sent in self._sent) - 1

    def discard_prepared(self) -> None:
        """Deallocate the prepared statements one by one, so that later plans see the current tables."""
        for name in self._prepared.values():
            self._pipeline().send_query_params(b"DEALLOCATE " + name, [])
            self._sent.append(_Sent())
        self._prepared.clear()

    def finish(self) -> list[list[Row]]:
        """Wait for the answers and return the rows of each statement.

        After a failed statement, the server executes no later statement.

        Raises psycopg's error for the first statement that failed.
        """
        found, error = self.finish_all()
        if error is not None:
            raise error
        return found

    def finish_all(self) -> tuple[list[list[Row]], psycopg.Error | None]:
        """Like `finish`, but return the rows of the statements before an error, and the error or None."""
        pgconn, sent, self._sent = self._connection.pgconn, self._sent, []
        pgconn.pipeline_sync()
        rows: list[list[Row]] = []
        error: psycopg.Error | None = None
        for number, result in enumerate(self._results()):
            if result.status not in _ANSWERED:
                error = error or self._error(result)
            elif error is None and number < len(sent):
                if sent[number].name:
                    self._prepared[sent[number].text] = sent[number].name
                else:
                    rows.append(_rows(result, sent[number].adapter))
        if pgconn.status == ConnStatus.OK:
            pgconn.exit_pipeline_mode()
        return rows, error

    def abandon(self) -> None:
        """Finish the sent statements and ignore their results. An open transaction stays open."""
        if self._sent and self._connection.pgconn.status == ConnStatus.OK:
            self.finish_all()
        self._sent = []

    def _pipeline(self) -> PGconn:
        if not self._sent:
            self._connection.pgconn.enter_pipeline_mode()
        return self._connection.pgconn

    def _results(self) -> list[PGresult]:
        """Return all results up to the synchronisation point."""
        pgconn = self._connection.pgconn
        results: list[PGresult] = []
        self._wait(writing=True)
        while True:
            while pgconn.is_busy():
                self._wait(writing=False)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None:
                if result.status == ExecStatus.PIPELINE_SYNC:
                    return results
                results.append(result)
            # libpq returns None after the results of each statement, so None does not end the loop.
            if pgconn.status != ConnStatus.OK:
                return results

    def _wait(self, *, writing: bool) -> None:
        pgconn = self._connection.pgconn
        poll = select.poll()
        poll.register(pgconn.socket, select.POLLIN)
        if writing:
            while pgconn.flush():
                # Read the arriving answers while sending. If this code only sent, client and server could wait for each
                # other.
                poll.modify(pgconn.socket, select.POLLIN | select.POLLOUT)
                poll.poll()
                pgconn.consume_input()
        else:
            poll.poll()

    def _error(self, result: PGresult) -> psycopg.Error:
        if self._connection.pgconn.status != ConnStatus.OK:
            return psycopg.OperationalError(self._connection.pgconn.error_message.decode(errors="replace"))
        return error_from_result(result, encoding=self._connection.info.encoding)


class OneByOne(RoundTrip):
    """The sender with the fast paths off: plain psycopg sends each statement alone, and waits for its answer."""

    def __init__(self, connection: Connection, schema: str) -> None:
        super().__init__(connection, schema, prepare=False)
        self._waiting: list[tuple[bytes, list[str | None], bool]] = []

    def send(
        self, statement: Statement, parameters: Mapping[str, bytes | None] | None = None, *, loads: bool = False
    ) -> int:
        """Keep a statement for `finish` and return its number; `loads` as in RoundTrip.send."""
        text, names = statement.numbered(self._schema)
        values = [parameters[name] for name in names] if parameters is not None else []
        self._waiting.append((text, [None if value is None else value.decode() for value in values], loads))
        return len(self._waiting) - 1

    def finish_all(self) -> tuple[list[list[Row]], psycopg.Error | None]:
        """Execute the statements in order, and stop after the first statement that fails."""
        waiting, self._waiting = self._waiting, []
        rows: list[list[Row]] = []
        for text, values, loads in waiting:
            cursor = psycopg.RawCursor(self._connection, row_factory=tuple_row)
            try:
                cursor.execute(text, values or None)
            except psycopg.Error as error:
                return rows, error
            assert cursor.pgresult is not None
            rows.append(cursor.fetchall() if loads else _rows(cursor.pgresult))
        return rows, None

    def abandon(self) -> None:
        """Drop the statements that were not executed."""
        self._waiting = []


class AfterTick(Protocol):
    """A statement of the caller that the server executes after the COMMIT of a tick, in the same round trip.

    The statement sees the entries of the tick. The tick may change nothing.
    """

    def send(self, trip: RoundTrip) -> int | None:
        """Send the statement. Return its number, or None if there is nothing to send."""

    def answered(self, rows: list[Row]) -> None:
        """Take the rows of the statement. The tick has committed. Not called if the tick or the statement failed."""


def round_trip(connection: Connection, schema: str, *, prepare: bool) -> RoundTrip:
    """Return a RoundTrip for this connection, or a OneByOne if the fast paths are off."""
    return RoundTrip(connection, schema, prepare=prepare) if switch.enabled else OneByOne(connection, schema)


def _rows(result: PGresult, adapter: abc.Transformer | None = None) -> list[Row]:
    if adapter is not None:
        adapter.set_pgresult(result)
        return adapter.load_rows(0, result.ntuples, tuple)
    columns = range(result.nfields)
    return [tuple(result.get_value(row, column) for column in columns) for row in range(result.ntuples)]
