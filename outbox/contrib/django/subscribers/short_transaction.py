"""A handler's transaction with few round trips, on PostgreSQL.

Django sends BEGIN, every statement and COMMIT one by one. This module sends BEGIN together with the first statement,
which writes the inbox row. This module sends COMMIT together with the last statement, which checks the inbox row. If
the check fails, the server does not execute COMMIT. If the check succeeds, the server executes COMMIT; Django then runs
the on_commit callbacks and ends its atomic block. Where `is_possible` is false, the inbox executes its statements
through Django.

For a single message, planning a statement costs the server more than executing it. So this module prepares its
statements if no pooler is between the connection and the server.

See decision 201.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, pq
from psycopg.errors import DivisionByZero, InvalidSqlStatementName

from outbox.broker.database.sender import RoundTrip, Row, note_backend, prepared_on, session_of
from outbox.broker.database.statement import Statement
from outbox.contrib.django.database.transactions import BlockWatch, is_watched

_BEGIN: Final = Statement("BEGIN")
_COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_SESSION: Final = Statement("SELECT pg_backend_pid(), current_setting('transaction_isolation')")

# These statements use no table of the broker's schema.
_NO_SCHEMA: Final = "public"
# After this number of messages, the prepared plans are discarded: a plan made for a nearly empty inbox would later read
# the whole table.
_PLANS_LAST: Final = 200


class ShortTransaction:
    """The statements before and after one handler call, in the outermost atomic block of the connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._raw: Connection = connection.connection
        self._session = session_of(self._raw)
        self._trip = RoundTrip(self._raw, _NO_SCHEMA)

    @staticmethod
    def is_possible(connection: BaseDatabaseWrapper, watch: BlockWatch) -> bool:
        """Whether the entered block is the outermost block and has default options, and no other code than `watch`
        watches its statements."""
        raw = connection.connection
        return (
            isinstance(raw, Connection)
            and len(connection.atomic_blocks) == 1
            and not is_watched(connection, watch)
            and (raw.isolation_level, raw.read_only, raw.deferrable) == (None, None, None)
            and _status(raw) == pq.TransactionStatus.IDLE
        )

    def begin(self, statement: Statement, values: Mapping[str, Any], *, prepare: bool) -> list[Row]:
        """Begin the transaction with this statement, and return the statement's rows.

        `prepare`: prepare the statement if the connection allows it. Django does not see the BEGIN.
        """
        with self._connection.wrap_database_errors:
            try:
                return self._begin(statement, values, prepare)
            except InvalidSqlStatementName:
                self._prepare_no_more()
                if _status(self._raw) == pq.TransactionStatus.INERROR:
                    self._trip.send(_ROLLBACK)
                return self._begin(statement, values, prepare)

    def _begin(self, statement: Statement, values: Mapping[str, Any], prepare: bool) -> list[Row]:
        session = self._session
        is_known = session.is_read_committed is not None
        if is_known and prepare and (prepared := prepared_on(self._raw)) is not None:
            self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepared=prepared)
            session.handled_messages += 1
            if session.handled_messages % _PLANS_LAST == 0:
                self._trip.discard_prepared()
        self._trip.send(_BEGIN)
        if not is_known:
            self._trip.send(_SESSION)
        self._trip.send(statement, values)
        *_, before, rows = self._trip.finish()
        if not is_known:
            [(pid, isolation)] = before
            note_backend(self._raw, int(pid))
            session.is_read_committed = isolation == b"read committed"
        return rows

    @property
    def can_share(self) -> bool:
        """Whether the begun transaction may have the effects of several handler calls."""
        return bool(self._session.is_read_committed)

    def savepoint(self, number: int, statement: Statement, values: Mapping[str, Any]) -> list[Row]:
        """Set a savepoint, then execute a statement, and return the statement's rows."""
        with self._connection.wrap_database_errors:
            self._trip.send(_savepoint("SAVEPOINT", number))
            self._trip.send(statement, values)
            _, rows = self._trip.finish()
        return rows

    def roll_back_to(self, number: int) -> None:
        """Undo everything that the transaction has done after a savepoint.

        Raises a database error if the savepoint does not exist any more.
        """
        with self._connection.wrap_database_errors:
            self._trip.send(_savepoint("ROLLBACK TO SAVEPOINT", number))
            self._trip.finish()

    def _prepare_no_more(self) -> None:
        """Stop preparing statements: the application has deallocated them (DEALLOCATE ALL), and may do so again."""
        self._session.prepared = None
        self._trip = RoundTrip(self._raw, _NO_SCHEMA)

    def is_whole(self) -> bool:
        """Whether the transaction can still commit, as far as the client knows."""
        return _status(self._connection.connection) == pq.TransactionStatus.INTRANS

    def commit(self, check: Statement | None, values: Mapping[str, Any]) -> bool:
        """Run `check` and commit. If the check fails (with a division by zero), commit nothing and return False."""
        with self._connection.wrap_database_errors:
            if check is not None:
                self._trip.send(check, values)
            self._trip.send(_COMMIT)
            answered, error = self._trip.finish_all()
            if error is not None:
                if isinstance(error, DivisionByZero) and not answered:
                    return False
                if isinstance(error, InvalidSqlStatementName):
                    self._prepare_no_more()
                raise error
        return True


@functools.cache
def _savepoint(command: str, number: int) -> Statement:
    # Each savepoint of a transaction has a name of its own. If all savepoints had the same name and the newest
    # savepoint were missing, ROLLBACK TO would find an earlier savepoint, and would also undo the work of earlier
    # handlers.
    return Statement(f"{command} outbox_{number}")


def _status(raw: Connection) -> pq.TransactionStatus | None:
    """The transaction status; None in a psycopg pipeline, whose statements the server may not have executed yet."""
    return None if raw.pgconn.pipeline_status else raw.info.transaction_status
