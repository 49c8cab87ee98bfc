"""Copies a consumer group's inbox rows (table outbox_inbox) to another group name; the caller passes the connection."""

from __future__ import annotations

import time
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import OperationalError

from outbox.contrib.django.database.columns import stored_uuid
from outbox.contrib.django.database.database_errors import LOCK_TIMEOUT_MARIADB_NUMBER, mariadb_number
from outbox.contrib.django.ledger.ledger import without_timeouts
from outbox.errors import UsageError
from outbox.utils.faults import point

# Rows per statement. Each statement is one transaction.
BATCH: Final = 5000
# A rename waits at most this long for the end of the handlers' transactions.
PATIENCE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.1

# Open transactions that have written to the inbox. A prepared transaction has no session, so its pid is null.
_WRITERS: Final = """
SELECT virtualtransaction, coalesce('session ' || pid, 'a prepared transaction')
FROM pg_locks
WHERE locktype = 'relation' AND relation = 'outbox_inbox'::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid IS DISTINCT FROM pg_backend_pid()
"""


def wait_for_writers(connection: BaseDatabaseWrapper) -> None:
    """Wait for open transactions that have written to the inbox, because rows of an open transaction cannot be copied.

    A consumer process that does not respond may have such a transaction although it has lost its queue. If a handler's
    transaction begins after this call, the transaction does not commit: before the commit, the handler's process sees
    that its lease has expired. On SQLite, this function does not wait. Raises UsageError if the transactions do not end
    in time.
    """
    if connection.vendor == "mysql":
        _wait_on_mariadb(connection)
    if connection.vendor != "postgresql":
        return
    ends = time.monotonic() + PATIENCE_SECONDS
    waited_for = writers = _writers(connection)
    while waited_for := {key: who for key, who in waited_for.items() if key in writers}:
        if time.monotonic() >= ends:
            raise _unended(connection, ", ".join(sorted(waited_for.values())))
        time.sleep(_PAUSE_SECONDS)
        writers = _writers(connection)


def _unended(connection: BaseDatabaseWrapper, evidence: str) -> UsageError:
    return UsageError(
        f"a transaction on {connection.alias!r} has written to the inbox and does not end ({evidence}). The command "
        "has stopped, because it cannot copy a row of an open transaction, and without this row the message would be "
        "handled twice. The group still has its former name: end that transaction and run this command again."
    )


def _wait_on_mariadb(connection: BaseDatabaseWrapper) -> None:
    """Lock the table once. MariaDB gives this lock when the transactions that have written to the table have ended.

    While an attempt waits, new handlers wait behind it. So each attempt waits for a second at most.
    """
    ends = time.monotonic() + PATIENCE_SECONDS
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION lock_wait_timeout = 1")
        while True:
            try:
                cursor.execute("LOCK TABLES outbox_inbox READ")
            except OperationalError as error:
                if mariadb_number(error) != LOCK_TIMEOUT_MARIADB_NUMBER:
                    raise
                if time.monotonic() >= ends:
                    raise _unended(connection, str(error)) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                cursor.execute("UNLOCK TABLES")
                return


def _writers(connection: BaseDatabaseWrapper) -> dict[str, str]:
    with connection.cursor() as cursor:
        cursor.execute(_WRITERS)
        return dict(cursor.fetchall())


_NEXT_GENERATION: Final = "SELECT min(generation) FROM outbox_inbox WHERE consumer_group = %s AND generation > %s"

_NEXT_ID: Final = """
SELECT message_id FROM outbox_inbox WHERE consumer_group = %s AND generation = %s AND message_id > %s
ORDER BY message_id
"""

_COPY: Final = """
INSERT INTO outbox_inbox (consumer_group, generation, message_id, handled_at)
SELECT %s, generation, message_id, handled_at
FROM outbox_inbox known
WHERE consumer_group = %s AND generation = %s AND message_id > %s {bound}
  AND NOT EXISTS (SELECT 1 FROM outbox_inbox twin WHERE twin.consumer_group = %s
                  AND twin.generation = known.generation AND twin.message_id = known.message_id)
"""


def copy(connection: BaseDatabaseWrapper, old: str, new: str) -> int:
    """Copy a group's inbox rows to another group name, and return the number of added rows.

    The function copies in batches. If no handler of the group runs during the call, the call copies all rows. Otherwise
    call the function again: it adds the missing rows.
    """
    copied, generation = 0, _next_generation(connection, old, -1)
    while generation is not None:
        after: Any = stored_uuid(connection, UUID(int=0))
        while after is not None:
            upto = _id_after(connection, old, generation, after)
            copied += _copy(connection, old, new, generation, after, upto)
            point("rename.copying")
            after = upto
        generation = _next_generation(connection, old, generation)
    return copied


def _next_generation(connection: BaseDatabaseWrapper, group: str, generation: int) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute(_NEXT_GENERATION, [group, generation])
        found: int | None = cursor.fetchone()[0]
        return found


def _id_after(connection: BaseDatabaseWrapper, group: str, generation: int, after: Any) -> Any:
    """Return the last message id of the next batch, or None if the next batch is the last batch."""
    with connection.cursor() as cursor:
        place = connection.ops.limit_offset_sql(BATCH - 1, BATCH)
        cursor.execute(f"{_NEXT_ID} {place}", [group, generation, after])
        row = cursor.fetchone()
        return None if row is None else row[0]


def _copy(connection: BaseDatabaseWrapper, old: str, new: str, generation: int, after: Any, upto: Any) -> int:
    statement = _COPY.format(bound="" if upto is None else "AND message_id <= %s")
    bounds = [after] if upto is None else [after, upto]
    with without_timeouts(connection), connection.cursor() as cursor:
        cursor.execute(statement, [new, old, generation, *bounds, new])
        return int(cursor.rowcount)


_HAS_COPIES: Final = """
SELECT 1 FROM outbox_inbox known
JOIN outbox_inbox twin ON twin.generation = known.generation AND twin.message_id = known.message_id
WHERE known.consumer_group = %s AND twin.consumer_group = %s
"""


def has_copies(connection: BaseDatabaseWrapper, old: str, new: str) -> bool:
    """Return whether any inbox row of group `old` also exists under the name `new`."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_HAS_COPIES} {connection.ops.limit_offset_sql(0, 1)}", [old, new])
        return cursor.fetchone() is not None
