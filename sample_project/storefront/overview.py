"""Where all messages are: read from the views that the broker publishes for that purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg
from django.db import connections
from psycopg.rows import class_row

from outbox.broker.database.statement import Statement
from outbox.contrib.django.conf import get_settings

RECENT: Final = 12
Row = TypeVar("Row")

_STATES: Final = Statement("""
SELECT topic,
       count(*) FILTER (WHERE state = 'committed') AS committed,
       count(*) FILTER (WHERE state = 'rolled_back') AS rolled_back,
       count(*) FILTER (WHERE state = 'undecided') AS undecided,
       count(*) FILTER (WHERE state = 'parked') AS parked,
       count(*) FILTER (WHERE decided_by = 'K') AS by_check_back
FROM {schema}.message_v1
GROUP BY topic ORDER BY topic
""")

_GROUPS: Final = Statement("""
SELECT o.consumer_group AS name, o.topic, sum(o.handled)::bigint AS handled,
       sum(coalesce(h.head, o.next_offset) - o.next_offset)::bigint AS lag
FROM {schema}.offset_v1 o
LEFT JOIN (SELECT queue_id, max(queue_offset) + 1 AS head FROM {schema}.queue_entry_v1 GROUP BY queue_id) h
       USING (queue_id)
WHERE left(o.topic, 1) <> '%%'
GROUP BY 1, 2 ORDER BY 1, 2
""")

_RECENT: Final = Statement("""
SELECT message_id, topic, key, stored_at, replace(state, '_', ' ') AS state,
       coalesce(decided_by = 'K', false) AS by_check_back
FROM {schema}.message_v1
ORDER BY log_id DESC LIMIT %s
""")


@dataclass(frozen=True, kw_only=True)
class TopicStates:
    """The messages of one topic by state; `by_check_back` counts those decided by asking back."""

    topic: str
    committed: int
    rolled_back: int
    undecided: int
    parked: int
    by_check_back: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """How far a consumer group is on one topic; `lag` counts what it has yet to handle."""

    name: str
    topic: str
    handled: int
    lag: int


@dataclass(frozen=True, kw_only=True)
class RecentMessage:
    """One of the newest messages."""

    message_id: UUID
    topic: str
    key: str
    stored_at: datetime
    state: str
    by_check_back: bool


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All that the page shows."""

    topics: list[TopicStates]
    groups: list[Group]
    recent: list[RecentMessage]

    def totals(self) -> Mapping[str, int]:
        """The tiles at the top, over all topics."""
        return {
            "committed": sum(topic.committed for topic in self.topics),
            "rolled back": sum(topic.rolled_back for topic in self.topics),
            "undecided": sum(topic.undecided for topic in self.topics),
            "parked": sum(topic.parked for topic in self.topics),
            "by check-back": sum(topic.by_check_back for topic in self.topics),
            "yet to be handled": sum(group.lag for group in self.groups),
        }


def overview() -> Overview:
    """Ask the broker's database. Raises django.db.Error when it cannot be reached."""
    settings = get_settings()
    wrapper = connections[settings.broker]
    wrapper.ensure_connection()
    connection: psycopg.Connection[Any] = wrapper.connection
    schema = settings.schema
    with wrapper.wrap_database_errors:
        return Overview(
            topics=_rows(connection, TopicStates, _STATES.on(schema)),
            groups=_rows(connection, Group, _GROUPS.on(schema)),
            recent=_rows(connection, RecentMessage, _RECENT.on(schema), [RECENT]),
        )


def _rows(connection: psycopg.Connection[Any], kind: type[Row], query: bytes, values: Sequence[int] = ()) -> list[Row]:
    with psycopg.Cursor(connection, row_factory=class_row(kind)) as cursor:
        return cursor.execute(query, values).fetchall()
