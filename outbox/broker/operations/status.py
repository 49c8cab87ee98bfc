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
from typing import Any, Final

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import incidents

_BROKER: Final = Statement("""
SELECT broker_id::text, incarnation, reject_transactional,
       (SELECT max(change) FROM {schema}.schema_version) AS schema_version,
       (SELECT max(tick_id) FROM {schema}.tick) AS last_tick,
       (SELECT extract(epoch FROM now() - at)::double precision
        FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS last_tick_age_seconds,
       (SELECT owner::text FROM {schema}.leader_lease
        WHERE role = 'sequencer' AND expires_at > clock_timestamp()) AS leader,
       (SELECT extract(epoch FROM now() - min(stored_at))::double precision FROM {schema}.pending_check
        WHERE parked_at IS NULL
          AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending_check.transaction_id))
           AS oldest_pending_seconds,
       (SELECT count(*) FROM {schema}.incident WHERE at > now() - interval '1 day') AS incidents_last_day,
       (SELECT snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS snapshot
FROM {schema}.broker
""")

# Publishing transactions (they hold a lock on op_log) that were in progress when the broker last resynchronised. Every
# role sees locks. Without pg_read_all_stats, PostgreSQL shows neither state nor age of another role's session.
_OPEN_SINCE_RESYNC: Final = Statement("""
SELECT CASE WHEN written.pid IS NOT NULL THEN 'session ' || written.pid
            ELSE 'prepared transaction ' || coalesce(quote_literal(prepared.gid), held.transactionid::text) END AS who,
       coalesce(application_name, '') AS application,
       CASE WHEN written.pid IS NULL THEN 'prepared'
            ELSE coalesce(activity.state, 'not visible to this role') END AS state,
       extract(epoch FROM clock_timestamp() - coalesce(prepared.prepared, activity.xact_start))::double precision
           AS age_seconds
FROM pg_locks written
JOIN pg_locks held ON held.locktype = 'transactionid' AND held.granted AND held.mode = 'ExclusiveLock'
    AND held.virtualtransaction = written.virtualtransaction AND held.pid IS NOT DISTINCT FROM written.pid
LEFT JOIN pg_stat_activity activity ON activity.pid = written.pid
LEFT JOIN pg_prepared_xacts prepared ON written.pid IS NULL AND prepared.transaction = held.transactionid
WHERE written.relation = '{schema}.op_log'::regclass AND written.mode = 'RowExclusiveLock'
  AND written.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  -- Its savepoints' locks are not in the snapshot.
  AND held.transactionid IN (
      SELECT pg_snapshot_xip(snapshot)::xid
      FROM {schema}.resync WHERE incarnation = (SELECT max(incarnation) FROM {schema}.resync))
ORDER BY age_seconds DESC NULLS LAST
""")

_TOPICS: Final = Statement("""
SELECT topic_id, name, message_types, queue_count, generation, retention_seconds
FROM {schema}.topic WHERE retry_of IS NULL ORDER BY name
""")

# One row per topic and term. `sent` counts log rows. `committed` and `rolled back` count what decisions list.
# `unsequenced` counts decisions that the last tick could not see. The other terms count rows of the table of that name.
_TERMS: Final = Statement("""
WITH decided AS MATERIALIZED (
    SELECT log.topic_id, op.decision,
           NOT pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot) AS unread
    FROM {schema}.op_log op CROSS JOIN LATERAL unnest(op.log_ids) AS one (log_id)
    JOIN {schema}.commit_log log USING (log_id)
), open AS MATERIALIZED (
    SELECT log.topic_id, pending.parked_at IS NOT NULL AS parked
    FROM {schema}.commit_log log LEFT JOIN {schema}.pending_check pending USING (transaction_id)
    WHERE half AND NOT EXISTS (SELECT FROM {schema}.op_log op WHERE op.transaction_id = log.transaction_id)
)
SELECT topic_id, 'sent', count(*) FROM {schema}.commit_log GROUP BY topic_id
UNION ALL SELECT topic_id, 'committed', count(*) FROM decided WHERE decision = 'C' GROUP BY topic_id
UNION ALL SELECT topic_id, 'rolled_back', count(*) FROM decided WHERE decision = 'R' GROUP BY topic_id
UNION ALL SELECT topic_id, 'unsequenced', count(*) FROM decided WHERE decision = 'C' AND unread GROUP BY topic_id
UNION ALL SELECT topic_id, 'undecided', count(*) FROM open WHERE NOT parked GROUP BY topic_id
UNION ALL SELECT topic_id, 'parked', count(*) FROM open WHERE parked GROUP BY topic_id
UNION ALL SELECT topic_id, 'held', count(*) FROM {schema}.held GROUP BY topic_id
UNION ALL
SELECT topic_id, 'scheduled', count(*)
FROM {schema}.scheduled JOIN {schema}.commit_log USING (log_id) WHERE queue_id IS NULL GROUP BY topic_id
UNION ALL
SELECT topic_id, 'recalled', count(*) FROM {schema}.recalled JOIN {schema}.commit_log USING (log_id) GROUP BY topic_id
UNION ALL
SELECT topic_id, 'queued', count(*)
FROM {schema}.consume_queue JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
WHERE retry_of IS NULL GROUP BY topic_id
UNION ALL
SELECT topic_id, term, sum(pruned)
FROM {schema}.pruned CROSS JOIN LATERAL (VALUES ('sent', sent), ('committed', committed),
    ('rolled_back', rolled_back), ('recalled', recalled), ('queued', queued)) AS terms (term, pruned)
GROUP BY topic_id, term
""")

# Per group and topic. `queued` comes from the heads that ticks carry and from the group's start. `lag` counts entries.
# An entry of a retry queue counts for the topic to which its message was published. `missed`:
# messages removed by retention before a group's position; the group counts them when its consumers return.
_GROUPS: Final = Statement("""
WITH heads AS MATERIALIZED (
    SELECT DISTINCT ON (queue_id) queue_id, head
    FROM {schema}.tick CROSS JOIN LATERAL unnest(queue_ids, heads) AS moved (queue_id, head)
    WHERE tick_id >= (SELECT max(tick_id) FROM {schema}.tick WHERE is_full)
    ORDER BY queue_id, tick_id DESC
), place AS (
    SELECT group_id, topic_id, false AS is_retry FROM {schema}.subscription
    UNION ALL
    SELECT retry_of, topic_id, true FROM {schema}.topic WHERE retry_of IS NOT NULL
), counted AS (
    SELECT place.group_id, place.is_retry, coalesce(heads.head, 0) AS head, newest.*,
           greatest(0, queue.floor - newest.next_offset) AS missed,
           (SELECT count(*) FROM {schema}.consume_queue entry
            WHERE entry.queue_id = queue.queue_id
              AND entry.queue_offset >= greatest(newest.next_offset, queue.floor)) AS waiting,
           (SELECT count(*) FROM {schema}.scheduled WHERE scheduled.queue_id = queue.queue_id) AS scheduled
    FROM place JOIN {schema}.queue USING (topic_id)
    LEFT JOIN heads USING (queue_id)
    CROSS JOIN LATERAL (
        SELECT start_offset, next_offset, handled, filtered, skipped, expired, moved
        FROM (SELECT * FROM {schema}.consumer_offset stored
              WHERE stored.group_id = place.group_id AND stored.queue_id = queue.queue_id
              ORDER BY epoch DESC, ordinal DESC LIMIT 1) AS stored
        UNION ALL
        SELECT 0, 0, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT FROM {schema}.consumer_offset stored
                          WHERE stored.group_id = place.group_id AND stored.queue_id = queue.queue_id)) AS newest
)
SELECT consumer_group.name, consumer_group.paused, consumer_group.broadcast,
       ARRAY(SELECT name FROM {schema}.subscription JOIN {schema}.topic USING (topic_id)
             WHERE subscription.group_id = consumer_group.group_id ORDER BY name) AS topics,
       (SELECT count(*) FROM {schema}.consumer
        WHERE consumer.group_id = consumer_group.group_id AND expires_at > clock_timestamp()) AS live_consumers,
       coalesce(sum(head - start_offset - moved) FILTER (WHERE NOT is_retry), 0)::bigint AS queued,
       coalesce(sum(handled), 0)::bigint AS handled, coalesce(sum(skipped), 0)::bigint AS skipped,
       coalesce(sum(filtered), 0)::bigint AS filtered,
       coalesce(sum(waiting) FILTER (WHERE NOT is_retry), 0)::bigint AS lag,
       coalesce(sum(scheduled + waiting) FILTER (WHERE is_retry), 0)::bigint AS retrying,
       (SELECT count(*) FROM {schema}.dead_letter
        WHERE dead_letter.group_id = consumer_group.group_id AND replayed_at IS NULL) AS dead,
       coalesce((SELECT sum(discarded) FROM {schema}.subscription
                 WHERE subscription.group_id = consumer_group.group_id), 0)::bigint AS discarded,
       coalesce(sum(expired + missed), 0)::bigint AS expired, coalesce(sum(missed), 0)::bigint AS missed,
       (SELECT coalesce(sum(recalled), 0)::bigint FROM {schema}.subscription
        WHERE subscription.group_id = consumer_group.group_id) AS recalled
FROM {schema}.consumer_group LEFT JOIN counted USING (group_id)
GROUP BY consumer_group.group_id ORDER BY consumer_group.name
""")


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
        [row] = run.objects(_BrokerRow, _BROKER)
        topics = _topics(run, row.snapshot)
        groups = run.objects(GroupStatus, _GROUPS)
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
    return run.objects(SessionSinceResync, _OPEN_SINCE_RESYNC)


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
    for topic_id, term, count in run.rows(_TERMS, {"snapshot": snapshot}):
        topic = totals.setdefault(topic_id, TopicTotals())
        setattr(topic, term, getattr(topic, term) + int(count))
    return [
        TopicStatus(name, types, queue_count, generation, retention_seconds, totals.get(topic_id, TopicTotals()))
        for topic_id, name, types, queue_count, generation, retention_seconds in run.rows(_TOPICS)
    ]


@contextmanager
def _one_snapshot(connection: Connection) -> Iterator[None]:
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        connection.rollback()
