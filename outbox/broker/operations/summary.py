"""The summary: numbers that take long to count, counted in the background and read as one row.

The leading broker process refreshes it (`summary_service`). Readers get its age with it. If no process has refreshed it
lately, because none leads, the reader counts at once instead. Times are seconds since 1970 by the database's clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from psycopg.pq import TransactionStatus

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import summary_sql

_Row = TypeVar("_Row")

# A summary older than this is not read: its writer has stopped.
FRESH_SECONDS: Final = 60.0
# The most time that counting in the background takes: if one count takes long, counts are rarer.
SHARE: Final = 0.05
_BLOCKED_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A consumer group on one topic, or on its retry queue. `lag` counts queued and unfinished messages.

    `oldest_at`: the time since which the first unfinished message could be consumed. `queued` and the counters that
    follow are totals since the group's start. `blocked` and `stopped` count queues. A broadcast group has no such row:
    it stores no positions.
    """

    group: str
    topic: str
    is_retry: bool
    paused: bool
    queues: int
    lag: int
    oldest_at: float | None
    queued: int
    handled: int
    filtered: int
    skipped: int
    sent_back: int
    dead: int
    expired: int
    blocked: int
    stopped: int


@dataclass(frozen=True, slots=True)
class GroupRest:
    """A group's data outside its queues: unsettled dead letters, and messages that wait for their next attempt."""

    group: str
    paused: bool
    broadcast: bool
    dead: int
    newest_dead_at: float | None
    retrying: int


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """A producer group's undecided half transactions. `due_since`: the time since which the oldest check is due."""

    group: str
    undecided: int
    parked: int
    oldest_at: float | None
    due_since: float | None
    oldest_parked_at: float | None


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """A topic: messages ever `queued`, and unqueued ones. `behind_since`:

    the oldest message that retention is to remove.
    """

    topic: str
    queues: int
    queued: int
    undecided: int
    parked: int
    held: int
    behind_since: float | None


@dataclass(frozen=True, slots=True)
class BlockedQueue:
    """A queue of an ordered group whose next message has failed, with the first and the last failure."""

    group: str
    topic: str
    queue: int
    message: str
    key: str
    error: str
    since: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole summary. `at`: time of counting; `now`: time of reading. `blocked` names the first twenty.

    `drawn`: the number of log ids drawn at the time of counting. It is None if the role may not see it, and in a stored
    summary. `stored_age_seconds`: the age of the newest stored summary, None without any. `is_late`: it had to be
    counted anew.
    """

    at: float
    now: float
    took_seconds: float
    groups: Sequence[GroupProgress]
    rests: Sequence[GroupRest]
    producers: Sequence[ProducerProgress]
    topics: Sequence[TopicProgress]
    blocked: Sequence[BlockedQueue]
    drawn: int | None = None
    stored_age_seconds: float | None = None
    is_late: bool = False

    @property
    def age_seconds(self) -> float:
        """The age of the counts."""
        return max(0.0, self.now - self.at)


@dataclass(frozen=True, slots=True)
class Growth:
    """A group's progress in a window of time, in messages."""

    group: str
    seconds: float
    handled: int
    sent_back: int
    dead: int


@dataclass(frozen=True, slots=True)
class SummaryPoint:
    """One stored summary in short, of a group or of all. The counters are totals.

    `stored` counts the drawn log ids: one for each stored message. An insert that was rolled back has drawn one, too.
    `stored` and `queued` are None for a single group. `oldest_seconds`: the waiting time of the oldest unfinished
    message; 0 without one. It and `lag` do not count retries.
    """

    at: float
    stored: int | None
    queued: int | None
    handled: int
    sent_back: int
    dead: int
    lag: int
    oldest_seconds: float


_PARTS: Final[Mapping[str, type[Any]]] = {
    "groups": GroupProgress,
    "rests": GroupRest,
    "producers": ProducerProgress,
    "topics": TopicProgress,
    "blocked": BlockedQueue,
}


# In the order of `summary_sql.COUNT`.
_COUNTED: Final[Sequence[type[Any]]] = (GroupProgress, GroupRest, ProducerProgress, TopicProgress)
_LIMITS: Final = "SET LOCAL jit = off; SET LOCAL lock_timeout = '1s'"


def count(run: Executor) -> Summary:
    """Count now, all parts from one snapshot; in the caller's transaction, or else in a separate one.

    It reads every position and every unsettled message: at the largest sizes it takes seconds. Raises LockNotAvailable
    when a session keeps a table locked.
    """
    started = time.monotonic()
    with _limited(run.connection):
        now, drawn, *counted = run.one(summary_sql.COUNT, prepare=False)
        groups, rests, producers, topics = (
            [row_type(**row) for row in rows] for row_type, rows in zip(_COUNTED, counted, strict=True)
        )
        blocked: list[BlockedQueue] = []
        if any(group.blocked for group in groups):
            blocked = run.objects(BlockedQueue, summary_sql.BLOCKED, {"limit": _BLOCKED_NAMED})
    return Summary(
        at=now,
        now=now,
        took_seconds=time.monotonic() - started,
        groups=groups,
        rests=rests,
        producers=producers,
        topics=topics,
        blocked=blocked,
        drawn=drawn,
    )


@contextmanager
def _limited(connection: Connection) -> Iterator[None]:
    # Without the limit, the wait for a lock would count as work, and the next count would come later. `lock_held` names
    # the session that holds the lock. Several statements in one message cannot be prepared.
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        with connection.transaction():
            connection.execute(_LIMITS, prepare=False)
            yield
        return
    connection.execute(f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {_LIMITS}", prepare=False)
    try:
        yield
    finally:
        connection.rollback()


def refresh(run: Executor) -> Summary:
    """Count and store."""
    summary = count(run)
    facts = {name: _packed(row_type, getattr(summary, name)) for name, row_type in _PARTS.items()}
    values = {"took": summary.took_seconds, "facts": json.dumps(facts), "totals": json.dumps(_totals(summary))}
    run.execute(summary_sql.STORE, values)
    return summary


def read(run: Executor, *, fresh_seconds: float = FRESH_SECONDS) -> Summary:
    """Return the newest summary, or a new count if none is fresh. Raises LockNotAvailable as `count` does."""
    with lock_limited(run.connection):
        row = run.row(summary_sql.NEWEST)
    if row is None:
        return replace(count(run), is_late=True)
    at, took, now, facts = row
    # If counting takes long, it is done more rarely.
    if now - at > max(fresh_seconds, 2 * took / SHARE):
        return replace(count(run), is_late=True, stored_age_seconds=now - at)
    parts: dict[str, Any] = {name: _unpacked(row_type, facts[name]) for name, row_type in _PARTS.items()}
    return Summary(
        at=at,
        now=now,
        took_seconds=took,
        stored_age_seconds=now - at,
        **parts,
    )


def growth(run: Executor, *, window_seconds: float) -> list[Growth]:
    """Return each group's progress between the newest summary and one `window_seconds` older; or nothing."""
    rows = run.rows(summary_sql.TOTALS, {"window": window_seconds})
    if len(rows) < 2:
        return []
    (began, before), (ended, after) = rows
    return [
        Growth(
            group,
            ended - began,
            *(max(0, new - old) for new, old in zip(totals[:3], before["groups"][group][:3], strict=True)),
        )
        for group, totals in after["groups"].items()
        if group in before["groups"]
    ]


def history(run: Executor, group: str | None = None) -> list[SummaryPoint]:
    """Return the stored summaries (a quarter of an hour) of one group, or of all together; the oldest first."""
    return [_moment(at, totals, group) for at, totals in reversed(run.rows(summary_sql.HISTORY))]


def _moment(at: float, totals: Mapping[str, Any], group: str | None) -> SummaryPoint:
    rows = [row for name, row in totals["groups"].items() if group in (None, name)]
    handled, sent_back, dead, lag = (sum(row[place] for row in rows) for place in range(4))
    oldest = max((row[4] for row in rows), default=0.0)
    if group is not None:
        return SummaryPoint(at, None, None, handled, sent_back, dead, lag, oldest)
    # Summaries of older code do not count the log.
    return SummaryPoint(at, totals.get("stored"), totals["queued"], handled, sent_back, dead, lag, oldest)


def _totals(summary: Summary) -> dict[str, Any]:
    """Return the data for `Growth` and `SummaryPoint`: total queued; per group three counters, lag, and its age."""
    found: dict[str, list[float]] = {}
    for one in summary.groups:
        known = found.setdefault(one.group, [0, 0, 0, 0, 0.0])
        for place, number in enumerate((one.handled, one.sent_back, one.dead, 0 if one.is_retry else one.lag)):
            known[place] += number
        if one.oldest_at is not None and not one.is_retry:
            known[4] = max(known[4], summary.at - one.oldest_at)
    return {"stored": summary.drawn, "queued": sum(topic.queued for topic in summary.topics), "groups": found}


def _packed(row_type: type[Any], rows: Iterable[Any]) -> dict[str, Any]:
    """Columns are named once: code of another version reads those it knows."""
    columns = [field.name for field in fields(row_type)]
    return {"columns": columns, "rows": [[getattr(row, name) for name in columns] for row in rows]}


def _unpacked(row_type: type[_Row], packed: Mapping[str, Any]) -> list[_Row]:
    columns: list[str] = packed["columns"]
    places = [columns.index(field.name) for field in fields(row_type)]  # type: ignore[arg-type]
    return [row_type(*[row[place] for place in places]) for row in packed["rows"]]
