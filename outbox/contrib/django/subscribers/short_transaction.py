"""A handler's transaction in as few round trips as its order allows, on PostgreSQL.

Django sends BEGIN, every statement and COMMIT one by one. Here BEGIN travels with the inbox row, and COMMIT with the
look at that row: where it is gone, the statement fails, and the server does not execute the COMMIT behind it. Django
finds the transaction ended, as it should be, runs what was registered for after the commit, and ends its block.

The statements of a message alone are prepared, where the connection leads straight to its server: planning them costs
the server more than executing them.
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

# A message alone has a statement that is planned in half the time, for where it is planned each time. For the settings
# see inbox_entries.
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
# Divides by zero where a row is gone.
_ALL_THERE: Final = Statement("""
SELECT 1 / (count(*) = %(count)s::integer)::integer FROM outbox_inbox
WHERE consumer_group = %(group)s AND generation = %(generation)s::integer AND message_id = ANY (%(message_ids)s::uuid[])
""")
# No table of these statements is in a schema of the broker's.
_NO_SCHEMA: Final = "public"
# A plan is kept for so many messages: one made while the inbox was nearly empty reads all of it, however it grows.
_PLANS_LAST: Final = 200


@dataclass(slots=True)
class _Session:
    """What is known of a connection: whether statements may be prepared on it, and which are."""

    prepares: bool = False
    prepared: dict[bytes, bytes] = field(default_factory=dict)
    messages: int = 0


# By the driver's connection, which Django's pool lends to one thread after the other.
_sessions: Final[WeakKeyDictionary[Connection, _Session]] = WeakKeyDictionary()


class ShortTransaction:
    """The statements of the inbox around one run of a handler, inside the outermost block of its connection."""

    def __init__(self, connection: BaseDatabaseWrapper, group: str, generation: int) -> None:
        self._connection = connection
        self._raw: Connection = connection.connection
        self._key = {"group": group.encode(), "generation": b"%d" % generation}
        # None until the first transaction of this connection has asked where it leads.
        self._session = _sessions.get(self._raw)
        self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepare=False)

    @staticmethod
    def is_possible(connection: BaseDatabaseWrapper) -> bool:
        """Whether the block that was just entered is the outermost one, plain, and nobody logs its statements."""
        raw = connection.connection
        return (
            isinstance(raw, Connection)
            and len(connection.atomic_blocks) == 1
            and not connection.queries_logged
            and (raw.isolation_level, raw.read_only, raw.deferrable) == (None, None, None)
            and _status(raw) == pq.TransactionStatus.IDLE
        )

    def begin(self, message_ids: Sequence[UUID], limits: tuple[str, str]) -> set[UUID]:
        """Begin, and write the rows; those that were not there yet."""
        lock, idle = limits
        values = {**self._key, "lock": lock.encode(), "idle": idle.encode()}
        if len(message_ids) == 1:
            statement, values["message_id"] = _ENTER_ONE, str(message_ids[0]).encode()
        else:
            statement, values["message_ids"] = _ENTER_ALL, _array(message_ids)
        # Not seen by the watch otherwise: from here on a transaction without this beginning is not the block's.
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
        """Not behind a pooler, which tells a process id of its own making, nor where psycopg prepares.

        A pooler may lend another server to the next transaction; psycopg takes back all that is prepared on its
        connection when it takes back its own.
        """
        return self._raw.prepare_threshold is None and pid == [(b"%d" % self._raw.info.backend_pid,)]

    def _prepare_no_more(self) -> None:
        """The application has taken back what was prepared here (DEALLOCATE ALL), and may do so again."""
        _sessions[self._raw] = self._session = _Session()
        self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepare=False)

    def is_whole(self) -> bool:
        """Whether the transaction can still be committed, as far as this side knows."""
        return _status(self._connection.connection) == pq.TransactionStatus.INTRANS

    def commit(self, message_ids: Sequence[UUID]) -> bool:
        """Commit if these rows are part of it; False, and nothing is committed, where they are not."""
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
    """None in a pipeline of psycopg's, whose statements may not be executed yet."""
    return None if raw.pgconn.pipeline_status else raw.info.transaction_status


def _array(values: Sequence[UUID]) -> bytes:
    return b"{%s}" % ",".join(map(str, values)).encode()
