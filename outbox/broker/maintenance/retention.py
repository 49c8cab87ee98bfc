"""Removing what everybody has read, in bounded passes behind the readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.maintenance import statements

DEFAULT_HARD_CAP_SECONDS: Final = 30 * 24 * 3600.0
_INCIDENTS_KEEP_SECONDS: Final = 90 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """`hard_cap_seconds`: a message that a group has not consumed is kept that long at least, then it expires.

    Consumed messages are kept for their topic's `retention_seconds`. `batch` bounds the rows of one statement.
    """

    hard_cap_seconds: float = DEFAULT_HARD_CAP_SECONDS
    batch: int = 5_000


@dataclass(frozen=True, slots=True)
class RetentionCounts:
    """What one pass removed; `expired` messages were not consumed by every group. `more`: a batch was full."""

    messages: int = 0
    retries: int = 0
    unqueued: int = 0
    expired: int = 0
    offsets: int = 0
    ticks: int = 0
    more: bool = False


def run_once(connection: Connection, schema: str, *, settings: RetentionSettings | None = None) -> RetentionCounts:
    """One bounded pass over all queues, on an autocommit connection. Undecided and parked messages always stay."""
    settings = settings or RetentionSettings()
    with cursor_on(connection) as cursor:
        queue_ids = [row[0] for row in cursor.execute(statements.QUEUES.on(schema), {"after": 0})]
    cleared = [_clear_queue(connection, schema, queue_id, settings) for queue_id in queue_ids]
    bounds = {"batch": settings.batch, "keep": 0}
    unqueued = _count(connection, statements.CLEAR_UNQUEUED, schema, bounds)
    offsets = _deleted(connection, statements.TRIM_OFFSETS, schema, {"batch": settings.batch})
    ticks = _deleted(connection, statements.TRIM_TICKS, schema, {"batch": settings.batch})
    _deleted(connection, statements.TRIM_SCANS, schema, {})
    _deleted(connection, statements.TRIM_INCIDENTS, schema, {"keep": _INCIDENTS_KEEP_SECONDS})
    if unqueued or any(queue.messages for queue in cleared):
        _deleted(connection, statements.MERGE_TOTALS, schema, {})
    return RetentionCounts(
        messages=sum(queue.messages for queue in cleared),
        retries=sum(queue.retries for queue in cleared),
        expired=sum(queue.expired for queue in cleared),
        unqueued=unqueued,
        offsets=offsets,
        ticks=ticks,
        more=any(queue.more for queue in cleared) or settings.batch in (unqueued, offsets, ticks),
    )


def _clear_queue(connection: Connection, schema: str, queue_id: int, settings: RetentionSettings) -> RetentionCounts:
    parameters = {"queue_id": queue_id, "batch": settings.batch, "cap": settings.hard_cap_seconds}
    with cursor_on(connection) as cursor:
        row = cursor.execute(statements.LIMIT.on(schema), parameters, prepare=True).fetchone()
    assert row is not None
    floor, limit, consumed, looked_at, is_retry = row
    # Entries kept below the floor come first, so that they go as soon as nothing refers to them.
    kept = 0 if is_retry else _clear(connection, schema, queue_id, 0, floor, settings, is_retry=False)
    if limit <= floor:
        return RetentionCounts(messages=kept)
    removed = _clear(connection, schema, queue_id, floor, limit, settings, is_retry=is_retry)
    expired = max(0, limit - max(floor, consumed)) if consumed is not None else 0
    if expired:
        detail = f"{expired} messages were removed at the hard cap before every consumer group had consumed them"
        incidents.record(connection, schema, [Incident(IncidentKind.EXPIRED, f"queue {queue_id}", detail)])
    return RetentionCounts(
        messages=kept + (0 if is_retry else removed),
        retries=removed if is_retry else 0,
        expired=expired,
        more=looked_at == settings.batch and limit - floor == looked_at,
    )


def _clear(
    connection: Connection,
    schema: str,
    queue_id: int,
    first: int,
    limit: int,
    settings: RetentionSettings,
    *,
    is_retry: bool,
) -> int:
    if first >= limit:
        return 0
    statement = statements.CLEAR_RETRY if is_retry else statements.CLEAR
    parameters = {"queue_id": queue_id, "first": first, "limit": limit, "batch": settings.batch}
    return _count(connection, statement, schema, parameters)


def _count(connection: Connection, statement: Statement, schema: str, parameters: Mapping[str, object]) -> int:
    with cursor_on(connection) as cursor:
        row = cursor.execute(statement.on(schema), parameters).fetchone()
    assert row is not None
    return int(row[0])


def _deleted(connection: Connection, statement: Statement, schema: str, parameters: Mapping[str, object]) -> int:
    with cursor_on(connection) as cursor:
        return cursor.execute(statement.on(schema), parameters).rowcount
