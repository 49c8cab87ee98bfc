"""Several statements sent together and answered together, for paths on which the client's own work counts.

psycopg's pipeline costs a client more than a small statement costs the server; this speaks to libpq's, which lies below
it. Values go and come as text: whoever uses it knows its few types.
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

from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement

Row = tuple[bytes | None, ...]

_ANSWERED: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


def array(values: Sequence[int]) -> bytes:
    """An array of integers or transaction ids."""
    return b"{%s}" % ",".join(map(str, values)).encode()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A statement on its way; `text` and `name` if this one prepares it."""

    text: bytes = b""
    name: bytes = b""


class RoundTrip:
    """One connection in autocommit, outside psycopg's own pipeline mode. Not thread-safe.

    `prepare`: whether statements may be prepared, which a pooler in transaction mode does not allow. `prepared`: what
    the connection has prepared before, for one that outlives this object; it is kept up to date.
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
        """Add a statement; it is sent with the others at the latest when they are finished. Its number among them."""
        pgconn = self._pipeline()
        text, names = statement.numbered(self._schema)
        values = [parameters[name] for name in names] if parameters is not None else []
        if not self._prepares:
            pgconn.send_query_params(text, values)
        else:
            name = self._prepared.get(text)
            if name is None:
                # No other process has it: behind a pooler that nobody knew of nothing else is executed by this name.
                name = b"outbox_%s" % uuid.uuid4().hex.encode()
                pgconn.send_prepare(name, text)
                self._sent.append(_Sent(text, name))
            pgconn.send_query_prepared(name, values)
        self._sent.append(_Sent())
        return sum(not sent.name for sent in self._sent) - 1

    def discard_prepared(self) -> None:
        """Take back what is prepared, a statement each: plans made anew see tables as they are by then."""
        for name in self._prepared.values():
            self._pipeline().send_query_params(b"DEALLOCATE " + name, [])
            self._sent.append(_Sent())
        self._prepared.clear()

    def finish(self) -> list[list[Row]]:
        """Wait for the answers: the rows of each statement. What came after one that failed was not executed.

        Raises the error of the first that failed as psycopg has it.
        """
        found, error = self.finish_all()
        if error is not None:
            raise error
        return found

    def finish_all(self) -> tuple[list[list[Row]], psycopg.Error | None]:
        """The same for who wants to know what was done before an error."""
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
        """Take back what was not finished, as far as the server has not executed it; a transaction stays open."""
        if self._sent and self._connection.pgconn.status == ConnStatus.OK:
            self.finish_all()
        self._sent = []

    def _pipeline(self) -> PGconn:
        if not self._sent:
            self._connection.pgconn.enter_pipeline_mode()
        return self._connection.pgconn

    def _results(self) -> list[PGresult]:
        """All of them, up to the synchronisation point."""
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
            # Else the None that follows the results of each statement.
            if pgconn.status != ConnStatus.OK:
                return results

    def _wait(self, *, writing: bool) -> None:
        pgconn = self._connection.pgconn
        poll = select.poll()
        poll.register(pgconn.socket, select.POLLIN)
        if writing:
            while pgconn.flush():
                # What arrives has to be read, or both sides would wait for each other.
                poll.modify(pgconn.socket, select.POLLIN | select.POLLOUT)
                poll.poll()
                pgconn.consume_input()
        else:
            poll.poll()

    def _error(self, result: PGresult) -> psycopg.Error:
        if self._connection.pgconn.status != ConnStatus.OK:
            return psycopg.OperationalError(self._connection.pgconn.error_message.decode(errors="replace"))
        return error_from_result(result, encoding=self._connection.info.encoding)


def _rows(result: PGresult) -> list[Row]:
    columns = range(result.nfields)
    return [tuple(result.get_value(row, column) for column in columns) for row in range(result.ntuples)]
