"""The rules find the conditions that hold now. `survey` evaluates all rules, `probe` only the two cheap rules.

The catalogue of all conditions is `conditions.py`. Status, probe, metrics, alerts and operator page show the conditions
that the rules find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from psycopg.errors import LockNotAvailable

from outbox.broker.database.arrays import texts, xids
from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.log import failing as failing_parts
from outbox.broker.log.failing import FailingPart, ProcessPart
from outbox.broker.log.incidents import IncidentKind
from outbox.broker.operations import audit, presence, sessions, topic_limits
from outbox.broker.operations import summary as summaries
from outbox.broker.operations.comparisons import ComparisonKind, DatabaseComparison, every
from outbox.broker.operations.conditions import (
    EVIDENCE,
    Condition,
    ConditionReport,
    Fact,
    Judged,
    Severity,
    Threshold,
    Thresholds,
    condition,
    worst_first,
)
from outbox.broker.operations.limits import SubscriptionLimits, list_limits
from outbox.broker.operations.summary import GroupProgress, Summary, lags_of
from outbox.broker.schedules import schedule
from outbox.broker.schema.install import check_schema
from outbox.broker.transaction import turns
from outbox.errors import SchemaError
from outbox.utils.refused_connections import is_refused, says_refused

# ---------------------------------------------------------------------------------------------------------------------
# Conditions of the broker as a whole: leader, ticks, summary, audit, and recorded incidents.

_BROKER: Final = Statement("""
SELECT (SELECT owner::text FROM {schema}.leader_lease WHERE role = 'sequencer' AND expires_at > clock_timestamp()),
       (SELECT extract(epoch FROM clock_timestamp() - expires_at)::double precision FROM {schema}.leader_lease
        WHERE role = 'sequencer' AND expires_at <= clock_timestamp()),
       tick.snapshot::text, extract(epoch FROM clock_timestamp() - tick.at)::double precision,
       extract(epoch FROM clock_timestamp()
                          - (SELECT min(due_at) FROM {schema}.scheduled WHERE due_at < clock_timestamp())
              )::double precision,
       broker.reject_transactional
FROM {schema}.broker, (SELECT snapshot, at FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS tick
""")

# The age of the oldest decision that the last tick could not see. The decision with the lowest transaction id counts as
# the oldest.
_UNREAD: Final = Statement("""
SELECT extract(epoch FROM clock_timestamp() - min(decided_at))::double precision
FROM (
    (SELECT decided_at FROM {schema}.op_log
     WHERE xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot()) ORDER BY xid LIMIT 1)
    UNION ALL
    (SELECT decided_at FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[]))
) AS unread
""")

_LEADER: Final = Statement("""
SELECT (SELECT owner::text FROM {schema}.leader_lease WHERE role = 'sequencer' AND expires_at > clock_timestamp()),
       (SELECT snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1)
""")

_PASSES: Final = Statement("""
SELECT producer_group AS group, name AS pass,
       extract(epoch FROM clock_timestamp() - began_at)::double precision AS seconds_ago, interval_seconds
FROM {schema}.periodic_pass ORDER BY began_at
""")

# Publishing transactions that were in progress when the broker last resynchronised. The statement finds publishing
# transactions by their lock on op_log, because every role can see locks. Without pg_read_all_stats, PostgreSQL shows
# neither state nor age of another role's session.
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

# Whether an incident is about a ledger that an undecided transaction needs.
_IS_OPEN: Final = """
kind = 'alarm' AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id::text = subject)
    AND EXISTS (SELECT FROM {schema}.pending_check WHERE pending_check.transaction_id::text = subject)
"""
# The newest thousand incidents of each kind, so that many incidents of one kind do not hide another kind. The inner
# statement sorts only ids, because sorting whole rows would take longer.
_INCIDENTS: Final = Statement(f"""
SELECT kind, open, count(*), (array_agg(subject ORDER BY incident_id DESC))[1:3],
       (array_agg(detail ORDER BY incident_id DESC))[1], max(at)::text
FROM (
    SELECT incident_id, kind, subject, detail, at, {_IS_OPEN} AS open
    FROM (SELECT incident_id, row_number() OVER (PARTITION BY kind ORDER BY at DESC) AS place
          FROM {{schema}}.incident WHERE at > clock_timestamp() - make_interval(secs => %(window)s)) AS recent
    JOIN {{schema}}.incident USING (incident_id)
    WHERE place <= 1000
) AS judged
GROUP BY kind, open
""")

_OF_INCIDENT: Final = {
    ("contradicted", False): ("contradicted", Severity.CRITICAL),
    ("refused", False): ("refused", Severity.WARNING),
    ("alarm", True): ("wrong_ledger", Severity.CRITICAL),
    ("alarm", False): ("checker_disagrees", Severity.WARNING),
    ("expired", False): ("expired", Severity.CRITICAL),
    ("path", False): ("path_flipped", Severity.CRITICAL),
}
# The time for which an event (an incident, a new dead letter) is shown, unless an operator settles it before.
_EVENT_SECONDS: Final = 24 * 3600.0
# The conditions of events: such a condition holds for `_EVENT_SECONDS`, or until an operator settles it. The condition
# `wrong_ledger` is not among them, because it ends when its transaction is decided.
SETTLED_BY_OPERATORS: Final = {name: kind for (kind, is_open), (name, _) in _OF_INCIDENT.items() if not is_open}

# The statement changes only rows that it sees, so an incident whose transaction commits later is shown.
_SETTLE: Final = Statement(f"""
UPDATE {{schema}}.incident SET kind = %(settled)s, detail = kind || ': ' || detail
WHERE kind = ANY (%(kinds)s::text[]) AND at > clock_timestamp() - make_interval(secs => %(window)s) AND NOT ({_IS_OPEN})
""")


def _of_broker(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions of the broker as a whole."""
    failing = failing_parts.failing(run)
    yield from _failing(run, failing)
    leader, gone_seconds, snapshot, tick_seconds, overdue_seconds, rejects = run.one(_BROKER)
    if leader is None and any(one.part is ProcessPart.SEQUENCING for one in failing):
        # The condition `process_failing` already gives the reason why no process leads. Starting another process would
        # not help.
        pass
    elif leader is None:
        fact = {"without_leader_seconds": gone_seconds, "last_tick_seconds": tick_seconds}
        yield from condition("no_sequencer", [(_without_leader(limits, gone_seconds), fact)])
    else:
        overdue = limits.tick_late_seconds.judge(overdue_seconds), {"waiting": "due", "seconds": overdue_seconds}
        yield from condition("ticks_late", [_undelivered(run, limits, snapshot), overdue])
        if summary.is_late and summary.stored_age_seconds is not None:
            yield from condition("summary_late", [(Severity.WARNING, {"age_seconds": summary.stored_age_seconds})])
    if rejects:
        yield from condition("rejecting", [(Severity.WARNING, {})])
    yield from _passes_late(run, limits, failing)
    yield from condition("pruning_behind", [_pruning(one, limits) for one in presence.pruning_behind(run)])
    yield from _incidents(run)
    names = ("session", "application", "state", "age_seconds")
    still_open: list[Fact] = [dict(zip(names, row, strict=True)) for row in run.rows(_OPEN_SINCE_RESYNC)]
    yield from condition("open_since_resync", [(Severity.WARNING, fact) for fact in still_open])
    last = audit.last(run)
    if last is not None:
        yield from condition(
            "not_conserved",
            [(Severity.CRITICAL, {"difference": text, "audited_at": last.at}) for text in last.differences],
        )


def probe(run: Executor, limits: Thresholds | None = None) -> ConditionReport:
    """Return whether a leader runs and makes its ticks in time. Raises psycopg.Error.

    The probe makes two look-ups by index, so its duration does not depend on the size of the tables. So a load balancer
    may call the probe every second.
    """
    leader, snapshot = run.one(_LEADER)
    if leader is None:
        return worst_first(condition("no_sequencer", [(Severity.CRITICAL, {})]))
    return worst_first(condition("ticks_late", [_undelivered(run, limits or Thresholds(), snapshot)]))


def _without_leader(limits: Thresholds, seconds: float | None) -> Severity | None:
    """Return the severity for a broker without a leader: critical if no process has ever led."""
    return Severity.CRITICAL if seconds is None else limits.no_sequencer_seconds.judge(seconds)


def _undelivered(run: Executor, limits: Thresholds, snapshot: str) -> Judged:
    """Return the waiting time of the oldest decision that the last tick could not see, with its severity.

    `snapshot` is the snapshot of the last tick.
    """
    seen = Snapshot.parse(snapshot)
    # The statement is not prepared, because a plan made without the values of the snapshot would read the whole table.
    [seconds] = run.one(_UNREAD, {"xmax": str(seen.xmax), "xip": xids(seen.in_progress)}, prepare=False)
    return limits.tick_late_seconds.judge(seconds), {"waiting": "decided", "seconds": seconds}


def _failing(run: Executor, parts: Sequence[FailingPart]) -> Iterator[Condition]:
    facts: list[Fact] = [
        {
            "failing": f"{one.part} of {one.of}" if one.of else str(one.part),
            "process": one.process,
            "since": one.since,
            "seen_seconds": one.seen_seconds,
            "error": one.error,
        }
        for one in parts
        if not says_refused(one.error)
    ]
    yield from condition("process_failing", [(Severity.CRITICAL, fact) for fact in facts])
    refused: list[Fact] = [
        {"refused": one.limit, "open_connections": one.used, "limit": one.allowed}
        for one in sessions.limits(run)
        if one.used >= one.allowed
    ]
    refused += [
        {"refused": one.process, "part": str(one.part), "since": one.since, "error": one.error}
        for one in parts
        if says_refused(one.error)
    ]
    refused += [
        {"refused": f"handlers of {group}", "topic": topic, "consumers": count, "since_seconds": age, "error": error}
        for group, topic, count, age, error in run.rows(_OUTAGES)
        if says_refused(error)
    ]
    yield from condition("connections_refused", [(Severity.CRITICAL, fact) for fact in refused])


def _passes_late(run: Executor, limits: Thresholds, failing: Sequence[FailingPart]) -> Iterator[Condition]:
    passes: list[Judged] = []
    receivers: list[Judged] = []
    for group, name, seconds_ago, period in run.rows(_PASSES):
        if any(one.part is ProcessPart.PASS and one.works_for(name) and one.works_for(group) for one in failing):
            continue
        severity = limits.pass_late_periods.judge(seconds_ago / max(period, 1.0))
        fact: Fact = {"producer_group": group, "last_run_seconds": seconds_ago, "period_seconds": period}
        if name.startswith(turns.RECEIVE):
            receivers.append((severity, {"receiver": name.removeprefix(turns.RECEIVE), **fact}))
        else:
            passes.append((severity, {"pass": name, **fact}))
    yield from condition("check_back_late", passes)
    yield from condition("receiver_late", receivers)


def _of_schedules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the schedules whose message is late."""
    now = schedule.clock(run)
    judged: list[Judged] = []
    for one in schedule.list_schedules(run):
        late = one.late_seconds(now)
        fact: Fact = {
            "schedule": one.name,
            "producer_group": one.producer_group,
            "topic": one.topic,
            "late_seconds": late,
            "error": one.error,
        }
        judged.append((limits.schedule_late_seconds.judge(late), fact))
    yield from condition("schedule_late", judged)


def _pruning(one: presence.PruningBehind, limits: Thresholds) -> Judged:
    fact: Fact = {
        "producer_group": one.producer_group,
        "alias": one.alias,
        "table": one.table,
        "behind_seconds": one.seconds,
        "keep_seconds": one.keep_seconds,
    }
    # Rows that are kept for too long only take space; they neither lose nor delay a message.
    return limits.retention_behind_seconds.judge(one.seconds) and Severity.WARNING, fact


def _incidents(run: Executor) -> Iterator[Condition]:
    for kind, is_open, count, subjects, detail, newest in run.rows(_INCIDENTS, {"window": _EVENT_SECONDS}):
        known = _OF_INCIDENT.get((kind, is_open))
        if known is not None:
            name, severity = known
            facts = [{"subject": subject, "newest": newest, "detail": detail} for subject in subjects]
            yield Condition(name, severity, facts, count)


def settleable(run: Executor) -> dict[str, int]:
    """Return the conditions of events that hold now, each with its number of incidents."""
    return {one.name: one.count for one in _incidents(run) if one.name in SETTLED_BY_OPERATORS}


def settle_incidents(run: Executor, names: Iterable[str]) -> int:
    """Settle the incidents of these conditions, so that the conditions end. Return the number of incidents."""
    kinds = texts([SETTLED_BY_OPERATORS[name] for name in names])
    return run.count(_SETTLE, {"kinds": kinds, "window": _EVENT_SECONDS, "settled": str(IncidentKind.SETTLED)})


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of data lost by a restore or a failover, from the last comparison with the application.

_NAMES: Final = {
    ComparisonKind.LEDGER: "lost_messages",
    ComparisonKind.DECISION: "lost_commits",
    ComparisonKind.INBOX: "lost_effects",
}


def _of_restores(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions that report data losses: a restore or a failover has lost data."""
    found = [comparison for comparison in every(run) if not comparison.is_clean]
    for kind, name in _NAMES.items():
        facts = [(one.missing, _fact(one)) for one in found if one.kind is kind]
        if facts:
            count = sum(max(1, missing) for missing, _ in facts)
            yield Condition(name, Severity.CRITICAL, [fact for _, fact in facts], count)


def _fact(one: DatabaseComparison) -> Fact:
    fact: dict[str, str | int | float | None] = {
        ("group" if one.kind is ComparisonKind.INBOX else "producer_group"): one.subject,
        "database": one.alias,
        "missing": one.missing,
    }
    if one.missing:
        fact |= {"first": str(one.first_at), "last": str(one.last_at), "ids": ", ".join(map(str, one.ids))}
    if one.unproven_to is not None:
        fact |= {"unknown_from": str(one.unproven_from), "unknown_to": str(one.unproven_to)}
    if one.kind is ComparisonKind.INBOX:
        fact |= {"topic": one.topic, "command": reset_command(one)}
    return fact


def reset_command(one: DatabaseComparison) -> str:
    """Return the command that makes a group handle the lost messages again; messages in the inbox are skipped."""
    assert one.first_at is not None
    # The command names a time 1 ms before the first lost message, so that rounding cannot exclude this message.
    at = (one.first_at - timedelta(milliseconds=1)).isoformat()
    return f"manage.py outbox_group reset {one.subject} {one.topic} --to-time {at}"


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of undecided transactions: no producer answers the checks, or no producer knows the outcome.

# Up to three undecided transactions of a producer group; the statement chooses among the two hundred rows whose checks
# are due first. If all transactions of these rows are decided now, the condition has no examples and names the command
# that lists the transactions.
_UNANSWERED: Final = Statement("""
SELECT transaction_id::text
FROM (SELECT transaction_id FROM {schema}.pending_check WHERE producer_group = %(group)s AND parked_at IS NULL
      ORDER BY due_at LIMIT 200) AS due
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = due.transaction_id)
LIMIT 3
""")

_PARKED: Final = Statement("""
SELECT transaction_id::text, producer_group,
       extract(epoch FROM clock_timestamp() - parked_at)::double precision, park_reason, checks,
       last_answer
FROM (SELECT * FROM {schema}.pending_check WHERE parked_at IS NOT NULL ORDER BY parked_at LIMIT 200) AS pending
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
ORDER BY parked_at LIMIT %(limit)s
""")


def _of_transactions(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions of undecided transactions."""
    unanswered: list[Judged] = []
    for group in summary.producers:
        due_seconds = summary.seconds_since(group.due_since)
        severity = limits.unanswered_seconds.judge(due_seconds)
        if severity:
            examples = [row[0] for row in run.rows(_UNANSWERED, {"group": group.group})]
            fact: Fact = {
                "producer_group": group.group,
                "undecided": group.undecided,
                "due_seconds": due_seconds,
                "transactions": ", ".join(examples) or f"`outbox_transaction list --group {group.group}` lists them",
            }
            unanswered.append((severity, fact))
    yield from condition("unanswered", unanswered)
    yield from _parked(run, limits, summary)


def _parked(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    rows = run.rows(_PARKED, {"limit": EVIDENCE})
    count = max(len(rows), sum(group.parked for group in summary.producers))
    severity = limits.parked_messages.judge(count)
    if severity is None or severity is Severity.OK or not count:
        return
    facts: list[Fact] = [
        {
            "transaction": transaction,
            "producer_group": group,
            "parked_seconds": age,
            "reason": reason,
            "checks": checks,
            "answer": answer,
        }
        for transaction, group, age, reason, checks, answer in rows
    ]
    # `facts` is empty if all of the oldest two hundred transactions have been decided after the summary was counted.
    yield Condition("parked", severity, facts or [{"list": "`outbox_transaction list --parked` lists them"}], count)


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of consumer groups (no consumer, lag, blocked, failing) and of messages that retention has not removed in
# time.

_RATE_WINDOW_SECONDS: Final = 60.0
# If a group sent back fewer messages in a minute, their share says nothing.
_FEW_SENT_BACK: Final = 100

# Broadcast groups store no positions, so no message waits if none of their instances runs. A consumer that leaves its
# group sets the `expires_at` of its leases to the present time. The time without a consumer is null if the group has
# never consumed the topic.
_NO_WORKER: Final = Statement("""
WITH alive AS MATERIALIZED (
    SELECT DISTINCT group_id, unnest(topics) AS topic FROM {schema}.consumer WHERE expires_at > clock_timestamp()
)
SELECT consumer_group.name AS group, topic.name AS topic,
       extract(epoch FROM clock_timestamp() - greatest(
           (SELECT max(lease.expires_at) FROM {schema}.queue_lease lease JOIN {schema}.queue USING (queue_id)
            WHERE lease.group_id = subscription.group_id AND queue.topic_id = subscription.topic_id),
           (SELECT max(gone.expires_at) FROM {schema}.consumer gone
            WHERE gone.group_id = subscription.group_id AND topic.name = ANY (gone.topics))
       ))::double precision AS seconds
FROM {schema}.subscription JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
LEFT JOIN alive ON alive.group_id = subscription.group_id AND alive.topic = topic.name
WHERE alive.topic IS NULL AND NOT broadcast
ORDER BY consumer_group.name, topic.name
""")

_STOPPED: Final = Statement("""
SELECT consumer_group.name, topic.name, queue.number, lease.stopped
FROM {schema}.queue_lease lease JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.queue USING (queue_id)
JOIN {schema}.topic USING (topic_id)
WHERE stopped IS NOT NULL ORDER BY 1, 2, 3
""")


def _of_groups(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions of consumer groups, and of messages that retention has not removed in time."""
    yield from _no_worker(run, limits, summary.groups)
    limited = {(one.group, one.topic): one for one in list_limits(run) if one.waiting_for} if summary.groups else {}
    yield from _lag(limits, summary, limited)
    yield from condition(
        "stopped_queue",
        [
            (Severity.CRITICAL, {"group": group, "topic": topic, "queue": number, "error": error})
            for group, topic, number, error in run.rows(_STOPPED)
        ],
    )
    blocked = sum(one.blocked for one in summary.groups)
    for found in condition("blocked_queue", [(Severity.CRITICAL, _blocked(one, summary)) for one in summary.blocked]):
        yield Condition(found.name, found.severity, found.evidence, max(blocked, found.count))
    yield from _dead_letters(limits, summary)
    yield from _retry_storms(run, limits)
    yield from condition(
        "retention_behind",
        [
            (limits.retention_behind_seconds.judge(behind), {"topic": topic.topic, "behind_seconds": behind})
            for topic in summary.topics
            if (behind := summary.seconds_since(topic.behind_since)) is not None
        ],
    )


def _no_worker(run: Executor, limits: Thresholds, groups: Iterable[GroupProgress]) -> Iterator[Condition]:
    by_group: dict[str, dict[str, float | None]] = {}
    rows = run.rows(_NO_WORKER)
    lags = {(one.group, one.topic): one.lag for one in groups} if rows else {}
    # If a consumer process runs and fails, the condition `process_failing` reports the failure. Starting another worker
    # would not help.
    failing = (
        [one for one in failing_parts.failing(run) if one.part in (ProcessPart.CONSUMING, ProcessPart.LEASES)]
        if rows
        else []
    )
    for group, topic, seconds in rows:
        if not any(one.works_for(group) for one in failing):
            by_group.setdefault(group, {})[topic] = seconds
    judged: list[Judged] = []
    for group, topics in by_group.items():
        lag = sum(lags.get((group, topic), 0) for topic in topics)
        shown = ", ".join(list(topics)[:EVIDENCE]) + (" …" if len(topics) > EVIDENCE else "")
        known = [seconds for seconds in topics.values() if seconds is not None]
        # If the group has never consumed a topic, its time without a consumer counts from the topic's first message.
        since = None if len(known) < len(topics) else max(known)
        severity = Severity.CRITICAL if since is None else limits.no_worker_seconds.judge(since)
        if severity and not lag:
            severity = Severity.WARNING
        judged.append((severity, {"group": group, "topics": shown, "lag": lag, "without_worker_seconds": since}))
    yield from condition("no_worker", judged)


def _lag(
    limits: Thresholds, summary: Summary, limited: Mapping[tuple[str, str], SubscriptionLimits]
) -> Iterator[Condition]:
    behind: list[Judged] = []
    paused: list[Judged] = []
    for one in summary.groups:
        if not one.lag:
            continue
        age = summary.seconds_since(one.oldest_at)
        severities = (limits.lag_seconds.judge(age), limits.lag_messages.judge(one.lag))
        severity = Severity.WARNING if one.paused else max(filter(None, severities), default=None)
        if severity:
            fact: Fact = {"group": one.group, "topic": one.topic, "messages": one.lag, "oldest_seconds": age}
            if (limit := limited.get((one.group, one.topic))) is not None:
                fact = {**fact, "waiting_for": limit.waiting_for, "limits": str(limit.limits)}
            (paused if one.paused else behind).append((severity, fact))
    for judged in (behind, paused):
        judged.sort(key=lambda one: -float(one[1]["oldest_seconds"] or 0.0))
    yield from condition("lag", behind)
    yield from condition("group_paused", paused)


def _blocked(one: summaries.BlockedQueue, summary: Summary) -> Fact:
    return {
        "group": one.group,
        "topic": one.topic,
        "queue": one.queue,
        "message": one.message,
        "key": one.key,
        "blocked_seconds": summary.seconds_since(one.since),
        "error": one.error,
    }


def _dead_letters(limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    yield from condition(
        "dead_letters",
        [
            (limits.dead_letters.judge(one.dead), {"group": one.group, "unsettled": one.dead, "newest_seconds": age})
            for one in summary.rests
            if (age := summary.seconds_since(one.newest_dead_at)) is not None and age <= _EVENT_SECONDS
        ],
    )


def _retry_storms(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    judged: list[Judged] = []
    storms = [
        one for one in summaries.growth(run, window_seconds=_RATE_WINDOW_SECONDS) if one.sent_back >= _FEW_SENT_BACK
    ]
    # Messages that wait for newer code leave their queue as if they were sent back, but have not failed.
    waiting = {group for group, *_ in run.rows(_UNKNOWN_VERSIONS, {"seconds": _UNKNOWN_SECONDS})} if storms else set()
    for one in storms:
        finished = one.handled + one.sent_back + one.dead
        if finished and one.group not in waiting:
            share = one.sent_back / finished
            fact: Fact = {
                "group": one.group,
                "sent_back": one.sent_back,
                "share": round(share, 3),
                "seconds": one.seconds,
            }
            judged.append((limits.retry_share.judge(share), fact))
    yield from condition("retry_storm", judged)


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of handlers that kill or hang their process, and of subscriptions that pause because of an outage.

# A process that dies at least `_DEATHS` times within `_DEATHS_SECONDS` is in a crash loop. Each death is stored as an
# incident.
_DEATHS: Final = 3
_DEATHS_SECONDS: Final = 600.0
_CRASH_LOOPS: Final = Statement("""
SELECT subject, count(*), max(at)::text, (array_agg(detail ORDER BY incident_id DESC))[1]
FROM (SELECT * FROM {schema}.incident
      WHERE kind = 'process_died' AND at > clock_timestamp() - make_interval(secs => %(seconds)s)
      ORDER BY at DESC LIMIT 1000) AS recent
GROUP BY subject HAVING count(*) >= %(deaths)s ORDER BY 2 DESC
""")

# Messages in quarantine are of two kinds: they kill their process, or their handler hangs. The statement returns the
# first messages of each kind, so that many of one kind do not hide one of the other kind.
_QUARANTINED: Final = Statement("""
SELECT hung, consumer_group.name, log.message_id::text, log.key, deaths,
       extract(epoch FROM clock_timestamp() - suspected_at)::double precision, evidence, total
FROM (SELECT *, count(*) OVER (PARTITION BY hung) AS total,
             row_number() OVER (PARTITION BY hung ORDER BY deaths DESC, suspected_at) AS place
      FROM {schema}.suspect) AS suspect
JOIN {schema}.consumer_group USING (group_id) LEFT JOIN {schema}.commit_log log USING (log_id)
WHERE place <= %(limit)s
ORDER BY deaths DESC, suspected_at
""")

_OUTAGES: Final = Statement("""
SELECT consumer_group.name, topic.name, count(*),
       max(extract(epoch FROM clock_timestamp() - since))::double precision, (array_agg(error ORDER BY seen_at DESC))[1]
FROM {schema}.outage JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
WHERE EXISTS (SELECT FROM {schema}.consumer
              WHERE consumer.instance_id = outage.instance_id AND expires_at > clock_timestamp())
GROUP BY 1, 2 ORDER BY 4 DESC
""")


# While a message waits, its consumer meets it again at least once a minute (LONGEST_WAIT_SECONDS).
_UNKNOWN_SECONDS: Final = 180.0
_UNKNOWN_VERSIONS: Final = Statement("""
SELECT consumer_group.name, topic.name, event, version, count(*),
       max(extract(epoch FROM clock_timestamp() - since))::double precision, (array_agg(error ORDER BY seen_at DESC))[1]
FROM {schema}.unknown_version JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
WHERE seen_at > clock_timestamp() - make_interval(secs => %(seconds)s)
  AND EXISTS (SELECT FROM {schema}.consumer
              WHERE consumer.instance_id = unknown_version.instance_id AND expires_at > clock_timestamp())
GROUP BY 1, 2, 3, 4 ORDER BY 6 DESC
""")


def _of_quarantine(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions of handlers that kill or hang their process, and of subscriptions in an outage."""
    yield from condition(
        "crash_loop",
        [
            (Severity.CRITICAL, {"process": process, "deaths": deaths, "last": last, "detail": detail})
            for process, deaths, last, detail in run.rows(_CRASH_LOOPS, {"seconds": _DEATHS_SECONDS, "deaths": _DEATHS})
        ],
    )
    crashing: list[Judged] = []
    hanging: list[Judged] = []
    totals: dict[bool, int] = {}
    for hung, group, message, key, deaths, age, evidence, total in run.rows(_QUARANTINED, {"limit": EVIDENCE}):
        totals[hung] = total
        fact: Fact = {
            "group": group,
            "message": message,
            "key": key,
            "deaths": deaths,
            "quarantined_seconds": age,
            "evidence": evidence,
        }
        (hanging if hung else crashing).append((Severity.CRITICAL if deaths else Severity.WARNING, fact))
    for found in (*condition("quarantined", crashing), *condition("hung_handlers", hanging)):
        yield Condition(found.name, found.severity, found.evidence, totals[found.name == "hung_handlers"])
    yield from condition(
        "outage",
        [
            (
                Severity.WARNING,
                {"group": group, "topic": topic, "consumers": count, "since_seconds": age, "error": error},
            )
            for group, topic, count, age, error in run.rows(_OUTAGES)
            if not says_refused(error)
        ],
    )


def _of_events(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the condition of messages that wait for newer code."""
    yield from condition(
        "unknown_version",
        [
            (
                Severity.WARNING,
                {
                    "group": group,
                    "topic": topic,
                    "event": event,
                    "version": version,
                    "consumers": count,
                    "since_seconds": age,
                    "error": error,
                },
            )
            for group, topic, event, version, count, age, error in run.rows(
                _UNKNOWN_VERSIONS, {"seconds": _UNKNOWN_SECONDS}
            )
        ],
    )


def _of_limits(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the condition of subscriptions whose messages wait for a limit."""
    yield from condition(
        "limit_binding",
        [
            (
                limits.limit_seconds.judge(one.waiting_seconds),
                {
                    "group": one.group,
                    "topic": one.topic,
                    "limits": str(one.limits),
                    "waiting_for": one.waiting_for,
                    "waiting": one.waiting,
                    "since_seconds": one.waiting_seconds,
                },
            )
            for one in list_limits(run)
            if one.waiting_seconds is not None
        ],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of the broker's PostgreSQL: old transactions, locks, disk space, used-up ids and sequences, and replicas.

# Sessions and prepared transactions that hold back vacuum in this database. Without pg_read_all_stats, PostgreSQL shows
# only the id of another role's session.
_OPEN: Final = Statement("""
SELECT 'session ' || pid, application_name, coalesce(state, 'not visible'), query_start::text,
       extract(epoch FROM clock_timestamp() - xact_start)::double precision
FROM pg_stat_activity
WHERE (datname = current_database() OR backend_type = 'walsender') AND pid <> pg_backend_pid()
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND xact_start IS NOT NULL
  -- Vacuum itself does not hold back vacuum.
  AND backend_type <> 'autovacuum worker'
UNION ALL
SELECT 'prepared transaction ' || quote_literal(gid), owner::text, 'prepared', NULL,
       extract(epoch FROM clock_timestamp() - prepared)::double precision
FROM pg_prepared_xacts WHERE database = current_database()
ORDER BY 5 DESC
""")

# Sessions that wait for a lock, with the sessions that block them. The waiting session uses the broker's tables or
# belongs to the broker.
_LOCKS: Final = Statement("""
SELECT 'session ' || blocker.pid, blocker.application_name, coalesce(blocker.state, 'not visible'),
       blocker.query_start::text, extract(epoch FROM clock_timestamp() - blocker.xact_start)::double precision,
       waiting.pid, waiting.application_name,
       extract(epoch FROM clock_timestamp() - coalesce(lock.waitstart, waiting.state_change))::double precision
FROM pg_stat_activity waiting
JOIN pg_locks lock ON lock.pid = waiting.pid AND NOT lock.granted
CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS blocking (pid)
LEFT JOIN pg_stat_activity blocker ON blocker.pid = blocking.pid
WHERE waiting.datname = current_database() AND waiting.wait_event_type = 'Lock'
  AND (waiting.application_name LIKE 'outbox%%'
       OR EXISTS (SELECT FROM pg_locks used JOIN pg_class ON pg_class.oid = used.relation
                  WHERE used.pid = waiting.pid AND relnamespace = '{schema}'::regnamespace))
ORDER BY 8 DESC
""")

# Sessions whose locks block even readers.
_EXCLUSIVE: Final = Statement("""
SELECT DISTINCT 'session ' || lock.pid, application_name, coalesce(state, 'not visible'), query_start::text,
       extract(epoch FROM clock_timestamp() - xact_start)::double precision, relname::text
FROM pg_locks lock JOIN pg_class ON pg_class.oid = lock.relation
LEFT JOIN pg_stat_activity activity ON activity.pid = lock.pid
WHERE relnamespace = '{schema}'::regnamespace AND lock.granted AND lock.mode = 'AccessExclusiveLock'
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")

_SPACE: Final = Statement("""
SELECT relname::text, pg_total_relation_size(oid) FROM pg_class
WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'p') ORDER BY 2 DESC
""")

_AGES: Final = Statement("""
SELECT age(datfrozenxid)::double precision, mxid_age(datminmxid)::double precision
FROM pg_database WHERE datname = current_database()
""")

_SEQUENCES: Final = Statement("""
SELECT sequencename::text, last_value / max_value::double precision
FROM pg_sequences
WHERE schemaname = (SELECT nspname FROM pg_namespace WHERE oid = '{schema}'::regnamespace)
  AND last_value IS NOT NULL
ORDER BY 2 DESC
""")

# On a replica, the end of the received WAL counts as the end of the WAL.
_REPLICAS: Final = Statement("""
WITH head AS (
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END AS lsn
)
SELECT 'replica ' || coalesce(nullif(application_name, ''), 'pid ' || pid), coalesce(state, 'not visible'),
       pg_wal_lsn_diff(head.lsn, replay_lsn)::double precision
FROM pg_stat_replication, head
UNION ALL
SELECT 'slot ' || slot_name, CASE WHEN active THEN 'active' ELSE 'has no reader' END,
       pg_wal_lsn_diff(head.lsn, restart_lsn)::double precision
FROM pg_replication_slots, head WHERE restart_lsn IS NOT NULL AND NOT active
""")


def _of_server(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions of the broker's PostgreSQL."""
    yield from condition(
        "transaction_open",
        [
            (
                limits.transaction_seconds.judge(age),
                {
                    "session": session,
                    "application": application,
                    "state": state,
                    "query_start": began,
                    "age_seconds": age,
                },
            )
            for session, application, state, began, age in run.rows(_OPEN)
        ],
    )
    yield from _locks(run, limits)
    yield from _space(run, limits)
    yield from _ages(run, limits)
    yield from condition(
        "replica_lag",
        [
            (limits.replica_lag_bytes.judge(behind), {"replica": session, "state": state, "bytes_behind": behind})
            for session, state, behind in run.rows(_REPLICAS)
        ],
    )


def shut_out(run: Executor) -> Iterator[Condition]:
    """Return the sessions that keep the broker's tables locked, or wait to lock them.

    The function also works for a session that cannot read the locked tables.
    """
    names = ("session", "application", "state", "query_start", "age_seconds", "table")
    facts: list[Fact] = [dict(zip(names, row, strict=True)) for row in run.rows(_EXCLUSIVE)]
    facts += [fact for _, fact in _waiting(run)]
    yield from condition("lock_held", [(Severity.CRITICAL, fact) for fact in facts or [{"session": "gone meanwhile"}]])


def _locks(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    judged = [(limits.lock_seconds.judge(waited), fact) for waited, fact in _waiting(run)]
    yield from condition("lock_held", judged)


def _waiting(run: Executor) -> Iterator[tuple[float, Fact]]:
    """Return the sessions that wait for a lock, how long they wait, and the sessions that hold the lock."""
    for session, application, state, began, age, waiting, waiting_name, waited in run.rows(_LOCKS):
        yield (
            waited,
            {
                "session": session or "a prepared transaction",
                "application": application,
                "state": state,
                "query_start": began,
                "age_seconds": age,
                "waiting": f"session {waiting} ({waiting_name})",
                "waiting_seconds": waited,
            },
        )


def _space(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    sizes = run.rows(_SPACE)
    total = sum(size for _, size in sizes)
    largest = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes[:3])
    yield from condition("space", [(limits.space_bytes.judge(total), {"bytes": total, "largest": largest})])


# The used part of an identity column's numbers. The last number is fixed by the type of the column.
_USED_SHARE: Final = Threshold(0.5, 0.9)


def _ages(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    xid_age, mxid_age = run.one(_AGES)
    yield from condition(
        "xid_age",
        [
            (limits.xid_age.judge(xid_age), {"counter": "transaction ids", "age": xid_age}),
            (limits.xid_age.judge(mxid_age), {"counter": "multixact ids", "age": mxid_age}),
        ],
    )
    yield from condition(
        "sequence_age",
        [(_USED_SHARE.judge(share), {"sequence": name, "used_share": share}) for name, share in run.rows(_SEQUENCES)],
    )


def _of_topics(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return the conditions of topics that are near a limit or over it."""
    near: list[Judged] = []
    over: list[Judged] = []
    for use in topic_limits.uses(run, lags_of(summary)):
        fact: Fact = {
            "topic": use.topic,
            "measure": use.measure,
            "group": use.group,
            "value": use.value,
            "limit": use.limit,
            "on_limit": use.on_limit,
        }
        if use.is_over:
            over.append((Severity.CRITICAL if use.on_limit == "refuse" else Severity.WARNING, fact))
        elif use.share >= topic_limits.NEAR:
            near.append((Severity.WARNING, fact))
    yield from condition("topic_near_limit", near)
    yield from condition("topic_over_limit", over)


Rules = Callable[[Executor, Thresholds, Summary], Iterator[Condition]]

_RULES: Final[Sequence[Rules]] = (
    _of_broker,
    _of_restores,
    _of_transactions,
    _of_groups,
    _of_quarantine,
    _of_events,
    _of_schedules,
    _of_limits,
    _of_topics,
    _of_server,
)


@dataclass(frozen=True, slots=True)
class Survey:
    """A verdict, and the summary on which it is based. `summary` is None if the tables could not be read."""

    verdict: ConditionReport
    summary: Summary | None


def survey(run: Executor, limits: Thresholds | None = None) -> Survey:
    """Return all conditions that hold now, on an autocommit connection outside a transaction.

    If the tables do not fit this code, or a session keeps them locked for more than a second, the verdict contains only
    one condition: `schema_version` or `lock_held`.
    """
    limits = limits or Thresholds()
    try:
        with lock_limited(run.connection):
            check_schema(run.connection, run.schema)
        # If no fresh summary is stored, `summaries.read` counts the figures itself, in a separate transaction.
        summary = summaries.read(run)
        with lock_limited(run.connection):
            return Survey(worst_first(one for rules in _RULES for one in rules(run, limits, summary)), summary)
    except SchemaError as error:
        return Survey(unusable(error), None)
    except LockNotAvailable:
        return Survey(worst_first(shut_out(run), is_complete=False), None)


def unusable(error: Exception) -> ConditionReport:
    """Return the verdict on a broker that does not answer; `error` is a SchemaError or an error of the connection."""
    name = "schema_version" if isinstance(error, SchemaError) else "unreachable"
    if is_refused(error):
        name = "connections_refused"
    return worst_first(condition(name, [(Severity.CRITICAL, {"error": str(error).strip()})]), is_complete=False)
