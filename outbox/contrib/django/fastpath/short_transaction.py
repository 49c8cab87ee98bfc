"""A handler's transaction with few round trips, on PostgreSQL.

Django sends BEGIN, every statement and COMMIT one by one. Here BEGIN is sent with the first statement (it writes the
inbox row), and COMMIT with the last one (it checks that row). If the check fails, the server does not execute the
COMMIT after it. Otherwise Django finds the transaction ended, as it should be, runs the registered on_commit callbacks,
and ends its block. With the fast paths off, the inbox executes its statements through Django.

The statements for a single message are prepared if the connection leads directly to its server, because planning them
costs the server more than executing them.

See decision 150.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, pq
from psycopg.errors import DivisionByZero, InvalidSqlStatementName

from outbox.broker.database.statement import Statement
from outbox.broker.fastpath import switch
from outbox.broker.fastpath.round_trip import RoundTrip, Row

_BEGIN: Final = Statement("BEGIN")
_COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_PID: Final = Statement("SELECT pg_backend_pid()")

# No table of these statements is in the broker's schema.
_NO_SCHEMA: Final = "public"
# A plan is kept for this many messages: one made while the inbox was nearly empty reads the whole table later.
_PLANS_LAST: Final = 200


@dataclass(slots=True)
class _Session:
    """The state of a connection: whether statements may be prepared on it, and which are."""

    prepares: bool = False
    prepared: dict[bytes, bytes] = field(default_factory=dict)
    messages: int = 0


# By the driver's connection, which Django's pool lends to different threads in turn.
_sessions: Final[WeakKeyDictionary[Connection, _Session]] = WeakKeyDictionary()


class ShortTransaction:
    """The statements around one run of a handler, inside the outermost block of its connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._raw: Connection = connection.connection
        # None until the first transaction of this connection has asked which server it reaches.
        self._session = _sessions.get(self._raw)
        self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepare=False)

    @staticmethod
    def is_possible(connection: BaseDatabaseWrapper) -> bool:
        """Whether the entered block is the outermost one and plain, and its statements are not logged."""
        raw = connection.connection
        return (
            switch.enabled
            and isinstance(raw, Connection)
            and len(connection.atomic_blocks) == 1
            and not connection.queries_logged
            and (raw.isolation_level, raw.read_only, raw.deferrable) == (None, None, None)
            and _status(raw) == pq.TransactionStatus.IDLE
        )

    def begin(self, statement: Statement, values: Mapping[str, bytes], *, prepare: bool) -> list[Row]:
        """Begin with this statement; returns its rows. With `prepare`, it is prepared where that is possible.

        Django does not see this BEGIN.
        """
        with self._connection.wrap_database_errors:
            try:
                return self._begin(statement, values, prepare)
            except InvalidSqlStatementName:
                self._prepare_no_more()
                if _status(self._raw) == pq.TransactionStatus.INERROR:
                    self._trip.send(_ROLLBACK)
                return self._begin(statement, values, prepare)

    def _begin(self, statement: Statement, values: Mapping[str, bytes], prepare: bool) -> list[Row]:
        session = self._session
        if session is not None and session.prepares and prepare:
            self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepare=True, prepared=session.prepared)
            session.messages += 1
            if session.messages % _PLANS_LAST == 0:
                self._trip.discard_prepared()
        self._trip.send(_BEGIN)
        if session is None:
            self._trip.send(_PID)
        self._trip.send(statement, values)
        *_, before, rows = self._trip.finish()
        if session is None:
            self._session = _sessions[self._raw] = _Session(prepares=self._may_prepare(before))
        return rows

    def _may_prepare(self, pid: list[Row]) -> bool:
        """Whether statements may be prepared: not behind a pooler, and not if psycopg prepares.

        A pooler is recognised because it reports a process id of its own. It may lend another server to the next
        transaction. psycopg deallocates all prepared statements of its connection when it deallocates its own.
        """
        return self._raw.prepare_threshold is None and pid == [(b"%d" % self._raw.info.backend_pid,)]

    def _prepare_no_more(self) -> None:
        """The application has deallocated the prepared statements (DEALLOCATE ALL), and may do so again."""
        _sessions[self._raw] = self._session = _Session()
        self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepare=False)

    def is_whole(self) -> bool:
        """Whether the transaction can still commit, as far as the client knows."""
        return _status(self._connection.connection) == pq.TransactionStatus.INTRANS

    def commit(self, check: Statement | None, values: Mapping[str, bytes]) -> bool:
        """Commit if `check` finds what it expects. If it divides by zero, commit nothing and return False."""
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


def _status(raw: Connection) -> pq.TransactionStatus | None:
    """None in a psycopg pipeline, whose statements may not be executed yet."""
    return None if raw.pgconn.pipeline_status else raw.info.transaction_status
