"""The statements that prune claims and steps (tables outbox_claim and outbox_step); the caller passes the connection.

See decision 203.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.contrib.django.database.columns import read_uuid, stored_uuid
from outbox.contrib.django.ledger.handled import Handled
from outbox.contrib.django.ledger.ledger import without_timeouts
from outbox.contrib.django.settings.conf import for_column


@dataclass(frozen=True, slots=True)
class ClaimTable:
    """A table with rows of claimed messages, and its column with the time of a row."""

    name: str
    time: str


TABLES: Final = (ClaimTable("outbox_claim", "expires_at"), ClaimTable("outbox_step", "begun_at"))


def oldest(
    connection: BaseDatabaseWrapper, table: ClaimTable, after: Any, *, older_than: datetime, limit: int
) -> list[Handled]:
    """The next messages with a row of this table before `older_than`, in the order of time.

    `after` is the time of the last row of the previous batch, or None.
    """
    parameters: list[Any] = [connection.ops.adapt_datetimefield_value(for_column(older_than, connection.alias))]
    statement = f"SELECT consumer_group, generation, message_id, {table.time} FROM {table.name} WHERE {table.time} < %s"
    if after is not None:
        parameters.append(after)
        statement += f" AND {table.time} > %s"
    statement += f" ORDER BY {table.time} {connection.ops.limit_offset_sql(0, limit)}"
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return [Handled(group, generation, read_uuid(value), at) for group, generation, value, at in cursor.fetchall()]


def delete(
    connection: BaseDatabaseWrapper, table: ClaimTable, rows: Sequence[Handled], *, older_than: datetime
) -> None:
    """Remove the rows of these messages that are older than `older_than`."""
    before = connection.ops.adapt_datetimefield_value(for_column(older_than, connection.alias))
    keys = sorted({(row.group, row.generation, row.message_id) for row in rows})
    with without_timeouts(connection), connection.cursor() as cursor:
        cursor.executemany(
            f"DELETE FROM {table.name} WHERE consumer_group = %s AND generation = %s AND message_id = %s"
            f" AND {table.time} < %s",
            [[group, generation, stored_uuid(connection, value), before] for group, generation, value in keys],
        )
