"""The state of a broker as one value: for the status command, metrics, and the audit of conservation.

Conservation: `sent = committed + rolled back + undecided + parked`, `committed = unsequenced + held + scheduled +
recalled + queued`, and per group `queued = handled + skipped + filtered + lag + retrying + dead + discarded + expired +
recalled` (running handlers are part of the lag; a retry can be recalled). A broken equation means that a message is
lost or doubled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.log import incidents
from outbox.broker.operations import status_sql


@dataclass(slots=True)
class TopicTotals:
    """Messages of a topic since its creation, by state; messages that retention removed are included."""

    sent: int = 0
    committed: int = 0
    rolled_back: int = 0
    undecided: int = 0
    parked: int = 0
    unsequenced: int = 0
    held: int = 0
    scheduled: int = 0
    recalled: int = 0
    queued: int = 0

    def differences(self) -> list[str]:
        """Return the equations that do not hold, in words."""
        decided = self.committed + self.rolled_back + self.undecided + self.parked
        placed = self.unsequenced + self.held + self.scheduled + self.recalled + self.queued
        found = []
        if self.sent != decided:
            found.append(f"{self.sent} sent, but {decided} committed, rolled back, undecided or parked")
        if self.committed != placed:
            found.append(f"{self.committed} committed, but {placed} unsequenced, held, scheduled, recalled or queued")
        return found


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """One declared topic."""

    name: str
    types: list[str]
    queue_count: int
    generation: int
    retention_seconds: int
    totals: TopicTotals


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One consumer group over its topics. `lag`: queued and unfinished messages, without the `retrying` ones.

    `discarded`: dead letters that an operator discarded. `expired`: messages that retention removed before the group
    had consumed them. `missed`: expired messages of a consumer that has not run since.
    """

    name: str
    paused: bool
    broadcast: bool
    topics: list[str]
    live_consumers: int
    queued: int
    handled: int
    skipped: int
    filtered: int
    lag: int
    retrying: int
    dead: int
    discarded: int
    expired: int
    missed: int
    recalled: int = 0

    def differences(self) -> list[str]:
        """Return the equation that does not hold, in words. A broadcast group has no stored positions to count."""
        if self.broadcast:
            return []
        ended = self.handled + self.skipped + self.filtered + self.dead + self.discarded + self.expired + self.recalled
        found = ended + self.lag + self.retrying
        if self.queued == found:
            return []
        return [
            f"{self.queued} queued, but {found} handled, skipped, filtered, lagging, retrying, dead, discarded, "
            f"expired or recalled"
        ]

    def conditions(self) -> list[str]:
        """Return conditions that need attention although every message is accounted for, in words."""
        if not self.missed or self.broadcast:
            return []
        return [
            f"{self.missed} messages have expired while no consumer of it ran: start its consumers, which continue "
            f"behind them, or delete the group if it is no longer needed (`outbox_group delete {self.name}`)"
        ]


@dataclass(frozen=True, slots=True)
class SessionSinceResync:
    """A publishing transaction from before the last resynchronisation that has not ended yet.

    Only its own messages wait for it. `age_seconds` is None if the role of the status may not see it.
    """

    who: str
    application: str
    state: str
    age_seconds: float | None

    def __str__(self) -> str:
        age = "" if self.age_seconds is None else f", for {self.age_seconds:.0f} s"
        return (
            f"{self.who} ({self.application or 'no application name'}, {self.state}{age}) is open since before the "
            f"last resynchronisation: its messages are delivered once it commits; if it is forgotten, end it"
        )


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker in one snapshot. Ages in seconds; None where there is nothing.

    `leader`: the process that sequences, None without one. `oldest_pending_seconds`: the oldest half transaction that
    waits for a check. `problems` is empty when every message is accounted for and a process sequences. Other faults are
    the conditions (operations/verdict.py).
    """

    broker_id: str
    incarnation: int
    reject_transactional: bool
    schema_version: int
    last_tick: int
    last_tick_age_seconds: float | None
    leader: str | None
    oldest_pending_seconds: float | None
    incidents_last_day: int
    topics: list[TopicStatus]
    groups: list[GroupStatus]
    incidents: list[dict[str, str]]
    open_since_resync: list[SessionSinceResync] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for json.dumps."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class _BrokerRow:
    """The plain fields of BrokerStatus, and the last tick's snapshot."""

    broker_id: str
    incarnation: int
    reject_transactional: bool
    schema_version: int
    last_tick: int
    last_tick_age_seconds: float | None
    leader: str | None
    oldest_pending_seconds: float | None
    incidents_last_day: int
    snapshot: str


def broker_status(run: Executor) -> BrokerStatus:
    """Return the state of a broker, all terms from one snapshot.

    It counts every retained row: it is an audit, not a health probe. The connection must be in autocommit and outside a
    transaction.
    """
    with _one_snapshot(run.connection):
        [row] = run.objects(_BrokerRow, status_sql.BROKER)
        topics = _topics(run, row.snapshot)
        groups = run.objects(GroupStatus, status_sql.GROUPS)
        recent = [
            {"kind": one.kind, "subject": one.subject, "detail": one.detail, "at": one.at.isoformat() if one.at else ""}
            for one in incidents.recent(run)
        ]
        still_open = open_since_resync(run)
    plain = dataclasses.asdict(row)
    del plain["snapshot"]
    return BrokerStatus(
        **plain,
        topics=topics,
        groups=groups,
        incidents=recent,
        open_since_resync=still_open,
        problems=_problems(row, topics, groups, still_open),
    )


def open_since_resync(run: Executor) -> list[SessionSinceResync]:
    """Return open publishing transactions from before the last resynchronisation, the oldest first."""
    return run.objects(SessionSinceResync, status_sql.OPEN_SINCE_RESYNC)


def _problems(
    broker: _BrokerRow, topics: list[TopicStatus], groups: list[GroupStatus], still_open: list[SessionSinceResync]
) -> list[str]:
    problems = [f"topic {topic.name!r}: {text}" for topic in topics for text in topic.totals.differences()]
    problems += [
        f"group {group.name!r}: {text}" for group in groups for text in (*group.differences(), *group.conditions())
    ]
    problems += map(str, still_open)
    if broker.leader is None:
        problems.append("no process sequences: start a broker process (celery worker --outbox, or outbox_worker)")
    if broker.reject_transactional:
        problems.append("an operator has switched transactional messages off: `outbox_reject off` accepts them again")
    return problems


def _topics(run: Executor, snapshot: str) -> list[TopicStatus]:
    totals: dict[int, TopicTotals] = {}
    for topic_id, term, count in run.rows(status_sql.TERMS, {"snapshot": snapshot}):
        topic = totals.setdefault(topic_id, TopicTotals())
        setattr(topic, term, getattr(topic, term) + int(count))
    return [
        TopicStatus(name, types, queue_count, generation, retention_seconds, totals.get(topic_id, TopicTotals()))
        for topic_id, name, types, queue_count, generation, retention_seconds in run.rows(status_sql.TOPICS)
    ]


@contextmanager
def _one_snapshot(connection: Connection) -> Iterator[None]:
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        connection.rollback()
