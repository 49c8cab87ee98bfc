"""Conditions of the broker's PostgreSQL: old transactions, locks, space, ages, replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import Condition, Fact, Severity, condition
from outbox.broker.operations.summary import Summary
from outbox.broker.operations.thresholds import Thresholds

# Sessions and prepared transactions that hold back vacuum here. Without pg_read_all_stats, PostgreSQL shows only the id
# of another role's session.
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

# Blocked and blocking sessions, if the blocked one uses the broker's tables or belongs to the broker.
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

# On a replica the end of the log is the end of the received log.
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


def rules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return all conditions of this module, which needs no summary."""
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

    It works for a session that cannot even read these tables.
    """
    names = ("session", "application", "state", "query_start", "age_seconds", "table")
    facts: list[Fact] = [dict(zip(names, row, strict=True)) for row in run.rows(_EXCLUSIVE)]
    facts += [fact for _, fact in _waiting(run)]
    yield from condition("lock_held", [(Severity.CRITICAL, fact) for fact in facts or [{"session": "gone meanwhile"}]])


def _locks(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    judged = [(limits.lock_seconds.judge(waited), fact) for waited, fact in _waiting(run)]
    yield from condition("lock_held", judged)


def _waiting(run: Executor) -> Iterator[tuple[float, Fact]]:
    """Return the sessions that wait for a lock here, for how long, and the sessions that hold it."""
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
        [
            (limits.sequence_share.judge(share), {"sequence": name, "used_share": share})
            for name, share in run.rows(_SEQUENCES)
        ],
    )
