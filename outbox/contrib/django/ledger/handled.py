"""The statements that remove rows of the inbox, of claims and of steps; the caller passes the connection.

An inbox row stays as long as the log has its message, whatever its age: a queue that was stopped for longer than the
retention of the inbox would otherwise deliver handled messages again, and the group would handle them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.dateparse import parse_datetime

from outbox.contrib.django.database.columns import read_uuid, stored_uuid
from outbox.contrib.django.ledger.ledger import without_timeouts
from outbox.contrib.django.settings.conf import for_column

# This list length is below the parameter limit of every database that Django supports.
_LARGEST_LIST: Final = 500


@dataclass(frozen=True, slots=True)
class Table:
    """A table with rows of handled or claimed messages, and its column with the time of a row."""

    name: str
    time: str


INBOX: Final = Table("outbox_inbox", "handled_at")
CLAIMS: Final = (Table("outbox_claim", "expires_at"), Table("outbox_step", "begun_at"))


@dataclass(frozen=True, slots=True)
class Handled:
    """A row of such a table.

    `at` is the row's time in UTC, in the type that the database's driver returns; the statements need this type.
    """

    group: str
    generation: int
    message_id: UUID
    at: Any


@dataclass(frozen=True, slots=True)
class HandledPosition:
    """A position in the order of time: before the rows of the time `at`, or after these rows if `is_behind`."""

    at: Any
    is_behind: bool = False


_SELECT: Final = "SELECT consumer_group, generation, message_id, {at} FROM {table} WHERE {time} < %s"

# Times are read and compared in UTC, because a session's local time repeats one hour of the year.
_IN_UTC: Final = {"postgresql": "{time} AT TIME ZONE 'UTC'"}
_FROM_UTC: Final = {"postgresql": "(%s::timestamp AT TIME ZONE 'UTC')"}


def oldest(
    connection: BaseDatabaseWrapper, table: Table, place: HandledPosition | None, *, older_than: datetime, limit: int
) -> list[Handled]:
    """The next rows of a table after a position that are before `older_than`, in the order of time.

    If the position is None, the function returns the first rows.
    """
    time = table.time
    parameters: list[Any] = [connection.ops.adapt_datetimefield_value(for_column(older_than, connection.alias))]
    at = _IN_UTC.get(connection.vendor, "{time}").format(time=time)
    statement = _SELECT.format(at=at, table=table.name, time=time)
    if place is not None:
        parameters.append(place.at)
        statement += f" AND {time} {'>' if place.is_behind else '>='} {_FROM_UTC.get(connection.vendor, '%s')}"
    statement += f" ORDER BY {time} {connection.ops.limit_offset_sql(0, limit)}"
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return [Handled(group, generation, read_uuid(value), at) for group, generation, value, at in cursor.fetchall()]


def place_behind(batch: Sequence[Handled], *, is_stuck: bool) -> HandledPosition:
    """The position at which the next batch begins: the last row's time, because more rows may have the same time.

    `is_stuck`: no row of the batch was removed. If `is_stuck` is true and all rows of the batch have the same time, the
    position is after this time. The next sweep reads the table from its beginning, so it also examines the rows of this
    time that this sweep has skipped.
    """
    return HandledPosition(batch[-1].at, is_behind=is_stuck and batch[0].at == batch[-1].at)


def moment_of(place: HandledPosition) -> datetime:
    at = parse_datetime(place.at) if isinstance(place.at, str) else place.at
    assert isinstance(at, datetime)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


# The rows of a batch are adjacent. The statement contains the times of the batch's first and last row, so the planner
# does not read the whole table. A claim that was renewed meanwhile has a later time, so it stays.
_DELETE_POSTGRESQL: Final = """
DELETE FROM {table} AS known
USING unnest(%s::text[], %s::integer[], %s::uuid[]) AS gone (consumer_group, generation, message_id)
WHERE known.consumer_group = gone.consumer_group AND known.generation = gone.generation
  AND known.message_id = gone.message_id
  AND known.{time} BETWEEN (%s::timestamp AT TIME ZONE 'UTC') AND (%s::timestamp AT TIME ZONE 'UTC')
"""

_DELETE: Final = """
DELETE FROM {table} WHERE {time} < %s AND consumer_group = %s AND generation = %s AND message_id IN
"""


def delete(connection: BaseDatabaseWrapper, table: Table, rows: Sequence[Handled], *, older_than: datetime) -> int:
    """Remove rows before `older_than`, which are in the order of time. Returns the number of removed rows."""
    if not rows:
        return 0
    before = connection.ops.adapt_datetimefield_value(for_column(older_than, connection.alias))
    names = {"table": table.name, "time": table.time}
    with without_timeouts(connection), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            columns: list[list[Any]] = [
                [row.group for row in rows],
                [row.generation for row in rows],
                [row.message_id for row in rows],
            ]
            cursor.execute(_DELETE_POSTGRESQL.format(**names), [*columns, rows[0].at, rows[-1].at])
            return int(cursor.rowcount)
        deleted = 0
        for (group, generation), same in groupby(sorted(rows, key=_inbox), key=_inbox):
            ids = [stored_uuid(connection, row.message_id) for row in same]
            for start in range(0, len(ids), _LARGEST_LIST):
                part = ids[start : start + _LARGEST_LIST]
                statement = f"{_DELETE.format(**names)}({', '.join(['%s'] * len(part))})"
                cursor.execute(statement, [before, group, generation, *part])
                deleted += cursor.rowcount
        return deleted


def _inbox(row: Handled) -> tuple[str, int]:
    return row.group, row.generation


_FORGET: Final = "DELETE FROM outbox_inbox WHERE consumer_group = %s AND message_id = %s"
_FORGET_STEPS: Final = """
DELETE FROM outbox_step WHERE consumer_group = %s AND message_id = %s
  AND EXISTS (SELECT 1 FROM outbox_inbox known WHERE known.consumer_group = %s AND known.message_id = %s)
"""


def forget(connection: BaseDatabaseWrapper, group: str, message_id: UUID) -> int:
    """Remove a group's inbox rows and steps of a message, in every generation. Return the number of removed inbox rows.

    The group then handles the message as if for the first time. If it has not handled the message, as after a dead
    letter, the results of finished steps stay.
    """
    values = [group, stored_uuid(connection, message_id)]
    with without_timeouts(connection), connection.cursor() as cursor:
        cursor.execute(_FORGET_STEPS, [*values, *values])
        cursor.execute(_FORGET, values)
        return int(cursor.rowcount)
