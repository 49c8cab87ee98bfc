"""Copying what the inbox (table outbox_inbox) knows of a consumer group to another name, the connection passed in."""

from __future__ import annotations

import time
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.contrib.django.ledger.ledger import without_timeouts
from outbox.errors import UsageError
from outbox.faults import point

# Rows of one statement, which is a transaction.
BATCH: Final = 5000
# How long the transactions of handlers are waited for.
PATIENCE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.1

# Whoever has written to the table and has not ended; prepared transactions have no session.
_WRITERS: Final = """
SELECT virtualtransaction, coalesce('session ' || pid, 'a prepared transaction')
FROM pg_locks
WHERE locktype = 'relation' AND relation = 'outbox_inbox'::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid IS DISTINCT FROM pg_backend_pid()
"""


def wait_for_writers(connection: BaseDatabaseWrapper) -> None:
    """Wait for the transactions that have written to the inbox and are open: their rows cannot be copied yet.

    A handler's process that froze may have one although it has lost its queue. Later ones write nothing: their process
    finds its lease over before it commits. PostgreSQL only; elsewhere nothing is waited for. Raises UsageError where
    they do not end in time.
    """
    if connection.vendor != "postgresql":
        return
    ends = time.monotonic() + PATIENCE_SECONDS
    waited_for = writers = _writers(connection)
    while waited_for := {key: who for key, who in waited_for.items() if key in writers}:
        if time.monotonic() >= ends:
            raise UsageError(
                f"a transaction on {connection.alias!r} has written to the inbox and does not end "
                f"({', '.join(sorted(waited_for.values()))}): its row could not be copied, and its message would take "
                f"effect twice. The group has its former name still: end that transaction and run this again."
            )
        time.sleep(_PAUSE_SECONDS)
        writers = _writers(connection)


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
    """Let the inbox know under another name what it knows of a group; returns how many rows were added.

    Batch by batch, and complete when it returns, if no handler of the group runs. Another call adds what is missing.
    """
    copied, generation = 0, _next_generation(connection, old, -1)
    while generation is not None:
        after: Any = _stored(connection, UUID(int=0))
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
    """The last id of the next batch; None where that is the last batch."""
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
    """Whether rows of a group are there under the other name too."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_HAS_COPIES} {connection.ops.limit_offset_sql(0, 1)}", [old, new])
        return cursor.fetchone() is not None


def _stored(connection: BaseDatabaseWrapper, value: UUID) -> Any:
    return value if connection.features.has_native_uuid_field else value.hex
