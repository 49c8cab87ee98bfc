"""Remove messages that all readers have passed, in bounded passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from outbox.broker.database.arrays import bigints, integers
from outbox.broker.database.executor import Executor
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.maintenance import retention_sql

DEFAULT_HARD_CAP_SECONDS: Final = 30 * 24 * 3600.0
_INCIDENTS_KEEP_SECONDS: Final = 90 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """`hard_cap_seconds`: an unconsumed message is kept at least this long, then it expires.

    Consumed messages are kept for their topic's `retention_seconds`. `batch` limits the rows of one statement.
    """

    hard_cap_seconds: float = DEFAULT_HARD_CAP_SECONDS
    batch: int = 5_000


@dataclass(frozen=True, slots=True)
class RetentionCounts:
    """The rows removed by one pass.

    `expired`: removed messages that some group had not consumed. `more`: a batch was full.
    """

    messages: int = 0
    retries: int = 0
    unqueued: int = 0
    expired: int = 0
    offsets: int = 0
    ticks: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Limit:
    """How far a queue may be cleared. `consumed` is None without a reading group: then no group misses a message."""

    queue_id: int
    floor: int
    limit: int
    consumed: int | None
    is_retry: bool

    @property
    def entries(self) -> int:
        """The number of entries to clear."""
        return self.limit - self.floor

    @property
    def expired(self) -> int:
        """The number of them that some group has not consumed."""
        return 0 if self.consumed is None else max(0, self.limit - max(self.floor, self.consumed))


def run_once(run: Executor, *, settings: RetentionSettings | None = None) -> RetentionCounts:
    """Run one bounded pass over all queues, on an autocommit connection. Undecided and parked messages always stay.

    A queue with nothing to remove costs one look at its oldest entry.
    """
    settings = settings or RetentionSettings()
    batch = {"batch": settings.batch}
    # First the rows kept below a floor: they are removed as soon as no row refers to them.
    [kept] = run.one(retention_sql.CLEAR_KEPT, batch)
    limits = run.objects(_Limit, retention_sql.LIMITS, batch | {"cap": settings.hard_cap_seconds})
    retries = sum(_clear_retries(run, limit) for limit in limits if limit.is_retry)
    messages = kept + sum(
        _clear(run, chunk, settings) for chunk in _chunks([one for one in limits if not one.is_retry], settings.batch)
    )
    for limit in limits:
        _report_expired(run, limit)
    [unqueued] = run.one(retention_sql.CLEAR_UNQUEUED, batch)
    offsets = run.count(retention_sql.TRIM_OFFSETS, batch)
    ticks = run.count(retention_sql.TRIM_TICKS, batch)
    run.execute(retention_sql.TRIM_SCANS)
    run.execute(retention_sql.TRIM_INCIDENTS, {"keep": _INCIDENTS_KEEP_SECONDS})
    if unqueued or messages:
        run.execute(retention_sql.MERGE_TOTALS)
    return RetentionCounts(
        messages=messages,
        retries=retries,
        expired=sum(limit.expired for limit in limits),
        unqueued=unqueued,
        offsets=offsets,
        ticks=ticks,
        more=any(limit.entries == settings.batch for limit in limits)
        or settings.batch in (kept, unqueued, offsets, ticks),
    )


def _chunks(limits: Sequence[_Limit], batch: int) -> Iterator[list[_Limit]]:
    """Group queues for one statement: at most `batch` entries per queue, and at most `batch` together."""
    chunk: list[_Limit] = []
    for limit in limits:
        if chunk and sum(one.entries for one in chunk) + limit.entries > batch:
            yield chunk
            chunk = []
        chunk.append(limit)
    if chunk:
        yield chunk


def _clear(run: Executor, limits: Sequence[_Limit], settings: RetentionSettings) -> int:
    """Remove entries up to the limits of their queues, and the rows that only they refer to; returns how many."""
    parameters = {
        "queue_ids": integers([limit.queue_id for limit in limits]),
        "floors": bigints([limit.floor for limit in limits]),
        "limits": bigints([limit.limit for limit in limits]),
        "batch": settings.batch,
    }
    return int(run.one(retention_sql.CLEAR, parameters)[0])


def _clear_retries(run: Executor, limit: _Limit) -> int:
    parameters = {"queue_id": limit.queue_id, "first": limit.floor, "limit": limit.limit}
    return int(run.one(retention_sql.CLEAR_RETRY, parameters)[0])


def _report_expired(run: Executor, limit: _Limit) -> None:
    if not limit.expired:
        return
    topic, number, groups = run.one(retention_sql.BEHIND, {"queue_id": limit.queue_id, "limit": limit.limit})
    detail = (
        f"{limit.expired} messages of queue {number} have expired: they were removed at the hard cap, and "
        f"{', '.join(map(repr, groups)) or 'some group'} had not consumed them. Delete groups that no longer run "
        f"(outbox_group delete)."
    )
    incidents.record(run, [Incident(IncidentKind.EXPIRED, topic, detail)])
