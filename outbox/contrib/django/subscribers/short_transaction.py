"""A handler's transaction with few round trips, on PostgreSQL.

Django sends BEGIN, every statement and COMMIT one by one. Here BEGIN is sent with the inbox row, and COMMIT with the
check of that row. If the row is gone, the check fails and the server does not execute the COMMIT after it. Otherwise
Django finds the transaction ended, as it should be, runs the registered on_commit callbacks, and ends its block.

The single-message statements are prepared if the connection leads directly to its server, because planning them costs
the server more than executing them.

See decision 150.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, pq
from psycopg.errors import DivisionByZero, InvalidSqlStatementName

from outbox.broker.database.round_trip import RoundTrip, Row
from outbox.broker.database.statement import Statement
from outbox.contrib.django.database.blocks import watch_of

_BEGIN: Final = Statement("BEGIN")
_COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_PID: Final = Statement("SELECT pg_backend_pid()")

# A single-message variant of the statement plans in half the time, if it is planned each time. For the settings see
# inbox_entries.
_ENTER_ONE: Final = Statement("""
INSERT INTO outbox_inbox (consumer_group, generation, message_id)
SELECT %(group)s, %(generation)s::integer, %(message_id)s::uuid
WHERE set_config('lock_timeout', %(lock)s, true) IS NOT NULL
  AND set_config('idle_in_transaction_session_timeout', %(idle)s, true) IS NOT NULL
ON CONFLICT DO NOTHING
RETURNING message_id
""")
_ENTER_ALL: Final = Statement("""
INSERT INTO outbox_inbox (consumer_group, generation, message_id)
SELECT %(group)s, %(generation)s::integer, message_id
FROM (SELECT set_config('lock_timeout', %(lock)s, true) AS lock_timeout,
             set_config('idle_in_transaction_session_timeout', %(idle)s, true) AS idle_timeout) AS setting,
     unnest(%(message_ids)s::uuid[]) AS message_id
WHERE lock_timeout IS NOT NULL AND idle_timeout IS NOT NULL
ORDER BY message_id
ON CONFLICT DO NOTHING
RETURNING message_id
""")
# Divides by zero if a row is gone.
_ALL_THERE: Final = Statement("""
SELECT 1 / (count(*) = %(count)s::integer)::integer FROM outbox_inbox
WHERE consumer_group = %(group)s AND generation = %(generation)s::integer AND message_id = ANY (%(message_ids)s::uuid[])
""")
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
    """The inbox statements around one run of a handler, inside the outermost block of its connection."""

    def __init__(self, connection: BaseDatabaseWrapper, group: str, generation: int) -> None:
        self._connection = connection
        self._raw: Connection = connection.connection
        self._key = {"group": group.encode(), "generation": b"%d" % generation}
        # None until the first transaction of this connection has asked which server it reaches.
        self._session = _sessions.get(self._raw)
        self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepare=False)

    @staticmethod
    def is_possible(connection: BaseDatabaseWrapper) -> bool:
        """Whether the entered block is the outermost one and plain, and its statements are not logged."""
        raw = connection.connection
        return (
            isinstance(raw, Connection)
            and len(connection.atomic_blocks) == 1
            and not connection.queries_logged
            and (raw.isolation_level, raw.read_only, raw.deferrable) == (None, None, None)
            and _status(raw) == pq.TransactionStatus.IDLE
        )

    def begin(self, message_ids: Sequence[UUID], limits: tuple[str, str]) -> set[UUID]:
        """Begin, and write the rows; returns the new ones."""
        lock, idle = limits
        values = {**self._key, "lock": lock.encode(), "idle": idle.encode()}
        if len(message_ids) == 1:
            statement, values["message_id"] = _ENTER_ONE, str(message_ids[0]).encode()
        else:
            statement, values["message_ids"] = _ENTER_ALL, _array(message_ids)
        # The watch does not see this BEGIN. Tell the watch of the block: a transaction that began in another way is
        # not the block's.
        watch_of(self._connection).note_begun()
        with self._connection.wrap_database_errors:
            try:
                rows = self._enter(statement, values)
            except InvalidSqlStatementName:
                self._prepare_no_more()
                if _status(self._raw) == pq.TransactionStatus.INERROR:
                    self._trip.send(_ROLLBACK)
                rows = self._enter(statement, values)
        return {UUID(value.decode()) for (value,) in rows if value is not None}

    def _enter(self, statement: Statement, values: Mapping[str, bytes]) -> list[Row]:
        session = self._session
        if session is not None and session.prepares and statement is _ENTER_ONE:
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

    def commit(self, message_ids: Sequence[UUID]) -> bool:
        """Commit if these rows are part of it. Otherwise commit nothing and return False."""
        with self._connection.wrap_database_errors:
            if message_ids:
                count = b"%d" % len(message_ids)
                self._trip.send(_ALL_THERE, {**self._key, "count": count, "message_ids": _array(message_ids)})
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


def _array(values: Sequence[UUID]) -> bytes:
    return b"{%s}" % ",".join(map(str, values)).encode()
