"""The statements of the unique keys (table outbox_unique); the caller passes the connection.

The publishing transaction inserts the row of a key before it publishes the message. So the row and the message commit
together, and a rollback removes both. The clock of this database measures the time for which a key is held.

The key is not in the broker, which sees a two-phase message before its transaction ends, and may never see a rollback:
the key would stay held without a message. `ON CONFLICT DO UPDATE … WHERE` would save a statement for an expired key,
but it locks rows that it does not change, so all duplicates of a key would wait for each other until COMMIT.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.contrib.django.database.columns import SQLITE_NOW, read_uuid, stored_uuid
from outbox.contrib.django.operations.personal_data import Rows, Scope
from outbox.errors import NotSupported, SendFailed


class KeyRequest(NamedTuple):
    """A message that is to hold the key `unique` of its topic for the time `within`."""

    topic: str
    unique: str
    within: timedelta
    message_id: UUID


# A topic and a unique key.
_Key = tuple[str, str]

# Every round after the first one means that another transaction has changed a row of this call between two statements.
_MAX_ROUNDS: Final = 10

# An INSERT waits for a transaction that has inserted the same key and is still open. The rows are inserted in the order
# of the arrays, which are sorted. So two calls that insert the same keys do not deadlock. A held key is not locked: if
# it were, all duplicates of one key would wait for each other.
_INSERT_POSTGRESQL: Final = """
INSERT INTO outbox_unique (topic, unique_key, message_id, until)
SELECT topic, unique_key, message_id, clock_timestamp() + make_interval(secs => seconds)
FROM unnest(%s::text[], %s::text[], %s::uuid[], %s::float8[]) AS wanted (topic, unique_key, message_id, seconds)
ON CONFLICT (topic, unique_key) DO NOTHING
RETURNING message_id
"""

# Under REPEATABLE READ, the snapshot may contain a row that pruning has removed, besides the row that this transaction
# has inserted since. The row with the latest time is the present row. A plain join would return only one row, because
# the planner knows that the key is unique.
_HELD_POSTGRESQL: Final = """
SELECT wanted.topic, wanted.unique_key, held.message_id, held.until <= clock_timestamp()
FROM unnest(%s::text[], %s::text[]) AS wanted (topic, unique_key)
CROSS JOIN LATERAL (
    SELECT message_id, until FROM outbox_unique
    WHERE topic = wanted.topic AND unique_key = wanted.unique_key ORDER BY until DESC LIMIT 1
) AS held
"""

# The rows are locked in the order of the arrays. If another transaction has replaced a row meanwhile, PostgreSQL checks
# the condition again after the wait, and the row is left out.
_REPLACE_POSTGRESQL: Final = """
WITH due AS (
    SELECT topic, unique_key, wanted.message_id, wanted.seconds
    FROM unnest(%s::text[], %s::text[], %s::uuid[], %s::float8[])
         WITH ORDINALITY AS wanted (topic, unique_key, message_id, seconds, place)
    JOIN outbox_unique held USING (topic, unique_key)
    WHERE held.until <= clock_timestamp()
    ORDER BY wanted.place
    FOR UPDATE OF held
)
UPDATE outbox_unique held
SET message_id = due.message_id, until = clock_timestamp() + make_interval(secs => due.seconds)
FROM due WHERE held.topic = due.topic AND held.unique_key = due.unique_key
RETURNING held.message_id
"""


def reserve(connection: BaseDatabaseWrapper, messages: Sequence[KeyRequest]) -> dict[UUID, UUID]:
    """Take the keys of these messages for the open transaction, and return the duplicates.

    For each message whose key another message holds, the result has the id of the other message. If several of the
    messages have the same topic and key, the first one takes the key. If an open transaction has taken a key, this
    function waits for the end of that transaction, as long as `lock_timeout` allows.

    Raises SendFailed if other transactions change the keys too often. Raises NotSupported if the database is not
    PostgreSQL, SQLite or MariaDB. Raises the errors of the database.
    """
    first: dict[_Key, KeyRequest] = {}
    for item in messages:
        first.setdefault((item.topic, item.unique), item)
    wanted = {key: first[key] for key in sorted(first)}
    if connection.vendor == "postgresql":
        held = _take_postgresql(connection, wanted)
    elif connection.vendor == "sqlite":
        held = {key: _take_one_sqlite(connection, key, item) for key, item in wanted.items()}
    elif connection.vendor == "mysql":
        held = {key: _take_one_mariadb(connection, key, item) for key, item in wanted.items()}
    else:
        raise NotSupported(
            f"Unique({messages[0].unique!r}) for topic {messages[0].topic!r}: the database {connection.alias!r} is "
            f"{connection.display_name}, and unique keys need PostgreSQL, SQLite or MariaDB. Nothing was published."
        )
    holders = {key: held.get(key, item.message_id) for key, item in wanted.items()}
    duplicates = {item.message_id: holders[item.topic, item.unique] for item in messages}
    return {message_id: holder for message_id, holder in duplicates.items() if message_id != holder}


def _take_postgresql(connection: BaseDatabaseWrapper, wanted: Mapping[_Key, KeyRequest]) -> dict[_Key, UUID]:
    """Take the keys and return the holders of the keys that other messages hold."""
    held: dict[_Key, UUID] = {}
    left = dict(wanted)
    for _ in range(_MAX_ROUNDS):
        left = _without(left, _write_keys(connection, _INSERT_POSTGRESQL, left))
        if not left:
            return held
        expired = {}
        for key, (holder, is_over) in _read(connection, left).items():
            if is_over:
                expired[key] = left[key]
            else:
                held[key] = holder
                del left[key]
        if expired:
            left = _without(
                left, _write_keys(connection, _REPLACE_POSTGRESQL, {key: left[key] for key in sorted(expired)})
            )
        if not left:
            return held
    raise _too_often(*next(iter(left)))


def _too_often(topic: str, unique: str) -> SendFailed:
    return SendFailed(
        f"Unique({unique!r}) for topic {topic!r}: other transactions took and freed the key {_MAX_ROUNDS} times during "
        "this call. Nothing was published. Run the whole operation again, in a new transaction."
    )


def _without(messages: Mapping[_Key, KeyRequest], taken: Collection[UUID]) -> dict[_Key, KeyRequest]:
    return {key: item for key, item in messages.items() if item.message_id not in taken}


def _write_keys(connection: BaseDatabaseWrapper, statement: str, wanted: Mapping[_Key, KeyRequest]) -> set[UUID]:
    """Execute an INSERT or UPDATE for these keys. Returns the messages that hold their keys now."""
    ids = [item.message_id for item in wanted.values()]
    seconds = [item.within.total_seconds() for item in wanted.values()]
    with connection.cursor() as cursor:
        cursor.execute(statement, [*_columns(wanted), ids, seconds])
        return {row[0] for row in cursor.fetchall()}


def _read(connection: BaseDatabaseWrapper, wanted: Collection[_Key]) -> dict[_Key, tuple[UUID, bool]]:
    """Return the holder of each key that has a row, and whether the time of the holder is over."""
    with connection.cursor() as cursor:
        cursor.execute(_HELD_POSTGRESQL, _columns(wanted))
        return {(topic, unique): (holder, is_over) for topic, unique, holder, is_over in cursor.fetchall()}


def _columns(keys: Collection[_Key]) -> list[list[Any]]:
    return [[topic for topic, _ in keys], [unique for _, unique in keys]]


# -- SQLite ----------------------------------------------------------------------------------------
#
# SQLite has one writer at a time, so no row changes between two statements of a transaction that writes.


_TAKE_SQLITE: Final = f"""
INSERT INTO outbox_unique (topic, unique_key, message_id, until)
VALUES (%s, %s, %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', %s))
ON CONFLICT (topic, unique_key) DO UPDATE SET message_id = excluded.message_id, until = excluded.until
WHERE outbox_unique.until <= {SQLITE_NOW}
"""
_HOLDER_SQLITE: Final = "SELECT message_id FROM outbox_unique WHERE topic = %s AND unique_key = %s"


def _take_one_sqlite(connection: BaseDatabaseWrapper, key: _Key, item: KeyRequest) -> UUID:
    """Take a key if it is free or its time is over. Return the message that holds the key now."""
    with connection.cursor() as cursor:
        seconds = f"+{item.within.total_seconds():.6f} seconds"
        cursor.execute(_TAKE_SQLITE, [*key, item.message_id.hex, seconds])
        cursor.execute(_HOLDER_SQLITE, key)
        return UUID(cursor.fetchone()[0])


# -- MariaDB ---------------------------------------------------------------------------------------


_ADD_MARIADB: Final = """
INSERT IGNORE INTO outbox_unique (topic, unique_key, message_id, until)
VALUES (%s, %s, %s, UTC_TIMESTAMP(6) + INTERVAL %s SECOND)
"""
_HOLDER_MARIADB: Final = """
SELECT message_id, until <= UTC_TIMESTAMP(6) FROM outbox_unique WHERE topic = %s AND unique_key = %s
"""
_REPLACE_MARIADB: Final = """
UPDATE outbox_unique SET message_id = %s, until = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE topic = %s AND unique_key = %s AND until <= UTC_TIMESTAMP(6)
"""


def _take_one_mariadb(connection: BaseDatabaseWrapper, key: _Key, item: KeyRequest) -> UUID:
    """Take a key if it is free or its time is over. Return the message that holds the key now.

    The INSERT waits for a transaction that has inserted the same key and is still open. The first read takes no lock,
    so duplicates of a held key do not wait for each other. The later reads see rows that are newer than the snapshot of
    REPEATABLE READ.
    """
    message_id, seconds = stored_uuid(connection, item.message_id), item.within.total_seconds()
    lock = ""
    with connection.cursor() as cursor:
        for _ in range(_MAX_ROUNDS):
            cursor.execute(_HOLDER_MARIADB + lock, key)
            row = cursor.fetchone()
            if row is not None and not row[1]:
                return read_uuid(row[0])
            if row is None:
                cursor.execute(_ADD_MARIADB, [*key, message_id, seconds])
            else:
                cursor.execute(_REPLACE_MARIADB, [message_id, seconds, *key])
            if cursor.rowcount == 1:
                return item.message_id
            lock = "LOCK IN SHARE MODE"
    raise _too_often(*key)


# -- pruning ---------------------------------------------------------------------------------------


# A publisher that replaces a row has locked it, and its row is left out. A publisher that meets a row which this
# statement deletes waits, and then inserts a new row.
_DELETE_POSTGRESQL: Final = """
WITH due AS (
    SELECT ctid AS place FROM outbox_unique WHERE until <= clock_timestamp()
    ORDER BY until LIMIT %s FOR UPDATE SKIP LOCKED
)
DELETE FROM outbox_unique USING due WHERE outbox_unique.ctid = due.place
"""
_DELETE_SQLITE: Final = f"""
DELETE FROM outbox_unique
WHERE rowid IN (SELECT rowid FROM outbox_unique WHERE until <= {SQLITE_NOW} ORDER BY until LIMIT %s)
"""

_EXPIRED_MARIADB: Final = """
SELECT topic, unique_key FROM outbox_unique WHERE until <= UTC_TIMESTAMP(6)
ORDER BY until LIMIT %s FOR UPDATE SKIP LOCKED
"""
_DELETE_MARIADB: Final = "DELETE FROM outbox_unique WHERE topic = %s AND unique_key = %s"


def delete_expired(connection: BaseDatabaseWrapper, *, limit: int) -> int:
    """Remove up to `limit` keys whose time is over. Returns the number of removed rows."""
    if connection.vendor == "mysql":
        return _delete_mariadb(connection, limit)
    statement = {"postgresql": _DELETE_POSTGRESQL, "sqlite": _DELETE_SQLITE}.get(connection.vendor)
    if statement is None:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(statement, [limit])
        return int(cursor.rowcount)


def _delete_mariadb(connection: BaseDatabaseWrapper, limit: int) -> int:
    """Lock the rows that no publisher has locked, and delete them: a DELETE of MariaDB cannot skip locked rows."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            cursor.execute(_EXPIRED_MARIADB, [limit])
            keys = cursor.fetchall()
            if keys:
                cursor.executemany(_DELETE_MARIADB, keys)
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")
        return len(keys)


def erase_keys(rows: Rows, scope: Scope) -> int:
    """Delete the rows of the erased messages: a unique key is chosen by the application, so it may be personal."""
    return rows.filter(message_id__in=scope.message_ids).delete()[0]
