"""Reading again, on the primaries, what a finding rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import sql

from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.repair.plan import Source, Step
from outbox.errors import BrokerError

# A half message is older than its row's time by as much as its transaction lasted; check-back parks what is older.
_BEFORE_ROW: Final = timedelta(hours=72)
# Twice, because the first finds it through the index and the second says that it is the same text.
_ROW: Final = "SELECT * FROM {table} WHERE {key} = %s AND ({key})::text = %s{when} LIMIT 2 FOR SHARE"
_OF_KEY: Final = (
    "SELECT message_id, state FROM {view} WHERE topic = %(topic)s AND key = %(key)s "
    "AND (%(tag)s::text IS NULL OR tag = %(tag)s) AND stored_at >= %(since)s{when} ORDER BY log_id"
)
_OF_IDS: Final = "SELECT message_id, state FROM {view} WHERE message_id = ANY(%(ids)s) ORDER BY log_id"
_DEAD: Final = (
    "SELECT dead_at FROM {view} WHERE consumer_group = %(group)s AND message_id = %(message_id)s "
    "AND replayed_at IS NULL"
)


@dataclass(frozen=True, slots=True)
class Known:
    """A message of the broker. `state` as in message_v1."""

    message_id: UUID
    state: str


def lock_row(connection: BaseDatabaseWrapper, source: Source, key: str) -> list[dict[str, Any]]:
    """The rows of the key that satisfy the rule (two at most), kept from change until the transaction ends."""
    statement = _ROW.format(table=_literal(source.table), key=_literal(source.key), when=_and(source.when))
    with connection.cursor() as cursor:
        cursor.execute(statement, [key, key])
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def messages_of(source: Source, step: Step, row_at: datetime) -> list[Known]:
    """What the broker has of the rule's messages with the key of `step`."""
    statement = _OF_KEY.replace("{when}", _and(source.message_when).replace("{", "{{").replace("}", "}}"))
    values = {"topic": source.topic, "tag": source.tag, "key": step.key, "since": row_at - _BEFORE_ROW}
    return [Known(*row) for row in _rows(statement, "message_v1", values)]


def message(message_id: UUID) -> Known | None:
    """One message; None when the broker has none of this id (any more)."""
    rows = _rows(_OF_IDS, "message_v1", {"ids": [message_id]})
    return Known(*rows[0]) if rows else None


def dead_since(group: str, message_id: UUID) -> datetime | None:
    """When the group gave the message up; None when it is no dead letter, or is being delivered again."""
    rows = _rows(_DEAD, "dead_letter_v1", {"group": group, "message_id": message_id})
    return rows[0][0] if rows else None


def _and(condition: str | None) -> str:
    return f" AND {_literal(condition)}" if condition else ""


def _literal(fragment: str) -> str:
    """SQL in which % is no place for a value."""
    return fragment.replace("%", "%%")


def _rows(statement: str, view: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
    with broker_connection() as (connection, schema):
        recovering = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        if recovering is None or recovering[0]:
            raise BrokerError("the broker's alias leads to a replica: what it does not show may be there.")
        # The condition is the rules' own SQL: the plan is made by whoever may write them.
        text = sql.SQL(statement).format(view=sql.Identifier(schema, view))
        return connection.execute(text, values).fetchall()
