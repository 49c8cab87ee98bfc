"""Removing what everybody has read, in bounded passes behind the readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.maintenance import retention_sql

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


@dataclass(frozen=True, slots=True)
class _Cleared:
    """What went from one queue: messages, or, from a retry queue, its entries alone."""

    messages: int = 0
    retries: int = 0
    expired: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Limit:
    """How far a queue may be cleared; `consumed` is None where no group reads it: nobody misses anything."""

    floor: int
    limit: int
    consumed: int | None
    looked_at: int
    is_retry: bool


def run_once(run: Executor, *, settings: RetentionSettings | None = None) -> RetentionCounts:
    """One bounded pass over all queues, on an autocommit connection. Undecided and parked messages always stay."""
    settings = settings or RetentionSettings()
    cleared = [_clear_queue(run, queue_id, settings) for (queue_id,) in run.rows(retention_sql.QUEUES)]
    batch = {"batch": settings.batch}
    [unqueued] = run.one(retention_sql.CLEAR_UNQUEUED, batch)
    offsets = run.count(retention_sql.TRIM_OFFSETS, batch)
    ticks = run.count(retention_sql.TRIM_TICKS, batch)
    run.execute(retention_sql.TRIM_SCANS)
    run.execute(retention_sql.TRIM_INCIDENTS, {"keep": _INCIDENTS_KEEP_SECONDS})
    if unqueued or any(queue.messages for queue in cleared):
        run.execute(retention_sql.MERGE_TOTALS)
    return RetentionCounts(
        messages=sum(queue.messages for queue in cleared),
        retries=sum(queue.retries for queue in cleared),
        expired=sum(queue.expired for queue in cleared),
        unqueued=unqueued,
        offsets=offsets,
        ticks=ticks,
        more=any(queue.more for queue in cleared) or settings.batch in (unqueued, offsets, ticks),
    )


def _clear_queue(run: Executor, queue_id: int, settings: RetentionSettings) -> _Cleared:
    parameters = {"queue_id": queue_id, "batch": settings.batch, "cap": settings.hard_cap_seconds}
    [found] = run.objects(_Limit, retention_sql.LIMIT, parameters, prepare=True)
    floor, limit = found.floor, found.limit
    # Entries kept below the floor come first, so that they go as soon as nothing refers to them.
    kept = 0 if found.is_retry else _clear(run, retention_sql.CLEAR, queue_id, 0, floor, settings)
    if limit <= floor:
        return _Cleared(messages=kept)
    more = found.looked_at == settings.batch and limit - floor == found.looked_at
    expired = max(0, limit - max(floor, found.consumed)) if found.consumed is not None else 0
    if found.is_retry:
        removed = _clear(run, retention_sql.CLEAR_RETRY, queue_id, floor, limit, settings)
        cleared = _Cleared(retries=removed, expired=expired, more=more)
    else:
        removed = _clear(run, retention_sql.CLEAR, queue_id, floor, limit, settings)
        cleared = _Cleared(messages=kept + removed, expired=expired, more=more)
    if expired:
        detail = f"{expired} messages were removed at the hard cap before every consumer group had consumed them"
        incidents.record(run, [Incident(IncidentKind.EXPIRED, f"queue {queue_id}", detail)])
    return cleared


def _clear(
    run: Executor, statement: Statement, queue_id: int, first: int, limit: int, settings: RetentionSettings
) -> int:
    """Remove the entries from `first` up to `limit` and what they alone refer to; returns how many."""
    if first >= limit:
        return 0
    parameters = {"queue_id": queue_id, "first": first, "limit": limit, "batch": settings.batch}
    [removed] = run.one(statement, parameters)
    return int(removed)
