"""The state of a broker as one value: for the status command, metrics, and the audit of conservation.

Conservation: `sent = committed + rolled back + undecided + parked`, `committed = unsequenced + held + scheduled +
recalled + queued`, and per group `queued = handled + skipped + filtered + lag + retrying + dead + expired` (running
handlers are part of the lag). A broken equation is a lost or doubled message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outbox.broker.database.arrays import cursor_on
from outbox.broker.database.connection import Connection
from outbox.broker.log import incidents
from outbox.broker.operations import status_statements


@dataclass(slots=True)
class TopicTotals:
    """Messages of a topic since it exists, by state; what retention removed is included."""

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
        """The equations that do not hold, in words."""
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
    """One consumer group over its topics. `lag` is what is queued and not finished, without what is `retrying`."""

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
    expired: int

    def differences(self) -> list[str]:
        """The equation that does not hold, in words. A broadcast group has no stored positions to count."""
        if self.broadcast:
            return []
        parts = (self.handled, self.skipped, self.filtered, self.lag, self.retrying, self.dead, self.expired)
        if self.queued == sum(parts):
            return []
        return [
            f"{self.queued} queued, but {sum(parts)} handled, skipped, filtered, lagging, retrying, dead or expired"
        ]


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A publishing transaction from before the last resynchronisation that has not ended yet.

    Nobody waits for it but its own messages. `age_seconds` is None where the role of the status may not see it.
    """

    who: str
    application: str
    state: str
    age_seconds: float | None

    def __str__(self) -> str:
        age = "" if self.age_seconds is None else f", for {self.age_seconds:.0f} s"
        return (
            f"{self.who} ({self.application or 'no application name'}, {self.state}{age}) is open since before the "
            f"last resynchronisation: what it published is delivered once it commits; if it is forgotten, end it"
        )


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker in one snapshot. Ages in seconds; None where there is nothing.

    `leader` is the process that sequences, None when nobody does. `oldest_pending_seconds`: the oldest half
    transaction that waits for a check. `problems` is empty when nothing needs attention.
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
    open_since_resync: list[OpenTransaction] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps."""
        return dataclasses.asdict(self)


_BROKER_FIELDS = tuple(one.name for one in dataclasses.fields(BrokerStatus))[:9]


def broker_status(connection: Connection, schema: str = "outbox") -> BrokerStatus:
    """The state of a broker, all terms from one snapshot. Counts every retained row: an audit, not a health probe.

    The connection must be in autocommit and outside a transaction.
    """
    with _one_snapshot(connection), cursor_on(connection) as cursor:
        row = cursor.execute(status_statements.BROKER.on(schema)).fetchone()
        assert row is not None
        *broker, snapshot = row
        topics = _topics(connection, schema, snapshot)
        groups = [GroupStatus(*values) for values in cursor.execute(status_statements.GROUPS.on(schema))]
        recent = [
            {"kind": one.kind, "subject": one.subject, "detail": one.detail, "at": one.at.isoformat() if one.at else ""}
            for one in incidents.recent(connection, schema)
        ]
        still_open = [
            OpenTransaction(*values) for values in cursor.execute(status_statements.OPEN_SINCE_RESYNC.on(schema))
        ]
    problems = [f"topic {topic.name!r}: {text}" for topic in topics for text in topic.totals.differences()]
    problems += [f"group {group.name!r}: {text}" for group in groups for text in group.differences()]
    problems += map(str, still_open)
    if broker[6] is None:
        problems.append("no process sequences: start a broker process (celery worker --outbox, or outbox_worker)")
    named: dict[str, Any] = dict(zip(_BROKER_FIELDS, broker, strict=True))
    return BrokerStatus(
        **named,
        topics=topics,
        groups=groups,
        incidents=recent,
        open_since_resync=still_open,
        problems=problems,
    )


def _topics(connection: Connection, schema: str, snapshot: str) -> list[TopicStatus]:
    totals: dict[int, TopicTotals] = {}
    with cursor_on(connection) as cursor:
        for topic_id, term, count in cursor.execute(status_statements.TERMS.on(schema), {"snapshot": snapshot}):
            topic = totals.setdefault(topic_id, TopicTotals())
            setattr(topic, term, getattr(topic, term) + int(count))
        return [
            TopicStatus(row[1], row[2], row[3], row[4], row[5], totals.get(row[0], TopicTotals()))
            for row in cursor.execute(status_statements.TOPICS.on(schema))
        ]


@contextmanager
def _one_snapshot(connection: Connection) -> Iterator[None]:
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        connection.rollback()
