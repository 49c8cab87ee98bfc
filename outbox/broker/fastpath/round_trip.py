"""Send several statements together, and read their answers together, for paths on which the client's CPU time matters.

psycopg's pipeline mode takes more CPU in the client than a small statement takes in the server. This module uses
libpq's pipeline directly. Values are sent and returned as text: the caller converts the few types that it uses.
"""

from __future__ import annotations

import select
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row

from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement
from outbox.broker.fastpath import switch

Row = tuple[bytes | None, ...]

_ANSWERED: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


def array(values: Sequence[int]) -> bytes:
    """Return the text of an array of integers or transaction ids."""
    return b"{%s}" % ",".join(map(str, values)).encode()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A sent command without its answer. `text` and `name` are set if the command prepares a statement."""

    text: bytes = b""
    name: bytes = b""


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

    def send(self, statement: Statement, parameters: Mapping[str, bytes | None] | None = None) -> int:
        """Add a statement and return its number. The statement is sent now or, at the latest, by `finish`."""
        pgconn = self._pipeline()
        text, names = statement.numbered(self._schema)
        values = [parameters[name] for name in names] if parameters is not None else []
        if not self._prepares:
            pgconn.send_query_params(text, values)
        else:
            name = self._prepared.get(text)
            if name is None:
                # The name is random, so no other prepared statement has this name, even behind an unknown pooler.
                name = b"outbox_%s" % uuid.uuid4().hex.encode()
                pgconn.send_prepare(name, text)
                self._sent.append(_Sent(text, name))
            pgconn.send_query_prepared(name, values)
        self._sent.append(_Sent())
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
                    rows.append(_rows(result))
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
        self._waiting: list[tuple[bytes, list[str | None]]] = []

    def send(self, statement: Statement, parameters: Mapping[str, bytes | None] | None = None) -> int:
        """Keep a statement for `finish` and return its number."""
        text, names = statement.numbered(self._schema)
        values = [parameters[name] for name in names] if parameters is not None else []
        self._waiting.append((text, [None if value is None else value.decode() for value in values]))
        return len(self._waiting) - 1

    def finish_all(self) -> tuple[list[list[Row]], psycopg.Error | None]:
        """Execute the statements in order, and stop after the first statement that fails."""
        waiting, self._waiting = self._waiting, []
        rows: list[list[Row]] = []
        for text, values in waiting:
            cursor = psycopg.RawCursor(self._connection, row_factory=tuple_row)
            try:
                cursor.execute(text, values or None)
            except psycopg.Error as error:
                return rows, error
            assert cursor.pgresult is not None
            rows.append(_rows(cursor.pgresult))
        return rows, None

    def abandon(self) -> None:
        """Drop the statements that were not executed."""
        self._waiting = []


def round_trip(connection: Connection, schema: str, *, prepare: bool) -> RoundTrip:
    """Return a RoundTrip for this connection, or a OneByOne if the fast paths are off."""
    return RoundTrip(connection, schema, prepare=prepare) if switch.enabled else OneByOne(connection, schema)


def _rows(result: PGresult) -> list[Row]:
    columns = range(result.nfields)
    return [tuple(result.get_value(row, column) for column in columns) for row in range(result.ntuples)]
