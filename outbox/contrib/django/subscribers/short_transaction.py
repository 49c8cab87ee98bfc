"""A handler's transaction in as few round trips as its order allows, on PostgreSQL.

Django sends BEGIN, every statement and COMMIT one by one. Here BEGIN travels with the inbox row, and COMMIT with the
look at that row: where it is gone, the statement fails, and the server does not execute the COMMIT behind it. Django
finds the transaction ended, as it should be, runs what was registered for after the commit, and ends its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, pq
from psycopg.errors import DivisionByZero

from outbox.broker.database.round_trip import RoundTrip
from outbox.broker.database.statement import Statement
from outbox.contrib.django.database.blocks import watch_of

_BEGIN: Final = Statement("BEGIN")
_COMMIT: Final = Statement("COMMIT")

# A plan of its own for each execution, so a message alone has a statement that is planned in half the time. For the
# settings see inbox_entries.
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


class ShortTransaction:
    """The statements of the inbox around one run of a handler, inside the outermost block of its connection."""

    def __init__(self, connection: BaseDatabaseWrapper, group: str, generation: int) -> None:
        self._connection = connection
        raw: Connection = connection.connection
        # Django does not prepare statements either, for the sake of poolers that lend a server per transaction.
        self._trip = RoundTrip(raw, _NO_SCHEMA, prepare=False)
        self._key = {"group": group.encode(), "generation": b"%d" % generation}

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
            self._trip.send(_BEGIN)
            self._trip.send(statement, values)
            _, rows = self._trip.finish()
        return {UUID(value.decode()) for (value,) in rows if value is not None}

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
                raise error
        return True


def _status(raw: Connection) -> pq.TransactionStatus | None:
    """None in a pipeline of psycopg's, whose statements may not be executed yet."""
    return None if raw.pgconn.pipeline_status else raw.info.transaction_status


def _array(values: Sequence[UUID]) -> bytes:
    return b"{%s}" % ",".join(map(str, values)).encode()
