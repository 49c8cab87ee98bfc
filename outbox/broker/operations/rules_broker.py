"""Conditions of the broker as a whole: leader, ticks, summary, audit, and recorded incidents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outbox.broker.database.arrays import xids
from outbox.broker.database.executor import Executor
from outbox.broker.database.snapshot import Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.log import failing as failing_parts
from outbox.broker.log.failing import FailingPart, ProcessPart
from outbox.broker.operations import audit, pruning
from outbox.broker.operations.conditions import (
    Condition,
    ConditionReport,
    Fact,
    Judged,
    Severity,
    condition,
    worst_first,
)
from outbox.broker.operations.summary import Summary
from outbox.broker.operations.thresholds import Thresholds
from outbox.broker.transaction import turns

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

# The age of the oldest decision that the last tick could not see: the lowest transaction id stands for the oldest.
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

# The newest thousand of each kind: a flood of one kind hides no other. Only narrow rows are sorted for it.
_INCIDENTS: Final = Statement("""
SELECT kind, open, count(*), (array_agg(subject ORDER BY incident_id DESC))[1:3],
       (array_agg(detail ORDER BY incident_id DESC))[1], max(at)::text
FROM (
    SELECT incident_id, kind, subject, detail, at,
           kind = 'alarm' AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id::text = subject)
               AND EXISTS (SELECT FROM {schema}.pending_check WHERE pending_check.transaction_id::text = subject)
               AS open
    FROM (SELECT incident_id, row_number() OVER (PARTITION BY kind ORDER BY at DESC) AS place
          FROM {schema}.incident WHERE at > clock_timestamp() - make_interval(secs => %(window)s)) AS recent
    JOIN {schema}.incident USING (incident_id)
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


def rules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return all conditions of this module."""
    failing = failing_parts.failing(run)
    yield from _failing(failing)
    leader, gone_seconds, snapshot, tick_seconds, overdue_seconds, rejects = run.one(_BROKER)
    if leader is None and any(one.part is ProcessPart.SEQUENCING for one in failing):
        # `process_failing` gives the reason why no process leads; another process would not help.
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
    yield from condition("pruning_behind", [_pruning(one, limits) for one in pruning.behind(run)])
    yield from _incidents(run, limits)
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
    """Return whether a process sequences, and in time: two look-ups by index, at any size. Raises psycopg.Error.

    It is the cheap part of `rules`, for load balancers that ask every second.
    """
    leader, snapshot = run.one(_LEADER)
    if leader is None:
        return worst_first(condition("no_sequencer", [(Severity.CRITICAL, {})]))
    return worst_first(condition("ticks_late", [_undelivered(run, limits or Thresholds(), snapshot)]))


def _without_leader(limits: Thresholds, seconds: float | None) -> Severity | None:
    """Also critical if no process has ever led."""
    return Severity.CRITICAL if seconds is None else limits.no_sequencer_seconds.judge(seconds)


def _undelivered(run: Executor, limits: Thresholds, snapshot: str) -> Judged:
    """Judge how long the oldest decision waits that the tick with this snapshot could not see."""
    seen = Snapshot.parse(snapshot)
    # Not prepared: without the values, the plan would read the whole table.
    [seconds] = run.one(_UNREAD, {"xmax": str(seen.xmax), "xip": xids(seen.in_progress)}, prepare=False)
    return limits.tick_late_seconds.judge(seconds), {"waiting": "decided", "seconds": seconds}


def _failing(parts: Sequence[FailingPart]) -> Iterator[Condition]:
    facts: list[Fact] = [
        {
            "failing": f"{one.part} of {one.of}" if one.of else str(one.part),
            "process": one.process,
            "since": one.since,
            "seen_seconds": one.seen_seconds,
            "error": one.error,
        }
        for one in parts
    ]
    yield from condition("process_failing", [(Severity.CRITICAL, fact) for fact in facts])


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


def _pruning(one: pruning.Behind, limits: Thresholds) -> Judged:
    fact: Fact = {
        "producer_group": one.producer_group,
        "alias": one.alias,
        "table": one.table,
        "behind_seconds": one.seconds,
        "keep_seconds": one.keep_seconds,
    }
    # Rows that are kept for too long take space, but break no promise.
    return limits.retention_behind_seconds.judge(one.seconds) and Severity.WARNING, fact


def _incidents(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    window = limits.window_seconds.warning
    for kind, is_open, count, subjects, detail, newest in run.rows(_INCIDENTS, {"window": window}):
        known = _OF_INCIDENT.get((kind, is_open))
        if known is not None:
            name, severity = known
            facts = [{"subject": subject, "newest": newest, "detail": detail} for subject in subjects]
            yield Condition(name, severity, facts, count)
