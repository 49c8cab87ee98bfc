"""Signs of life: whether a process leads, and how SQL finds the processes that gave no sign of life in time."""

from __future__ import annotations

from typing import Final, LiteralString

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement


def is_silent(member: LiteralString) -> LiteralString:
    """Return the SQL text for "the process gave no sign of life for one and a half of its intervals".

    A process renews its membership three times per term, so half a term is one and a half intervals. `member` has the
    end of the membership, and `known` is `consumer_process`.
    """
    return f"coalesce(clock_timestamp() > known.seen_at + ({member}.expires_at - known.seen_at) / 2, false)"


_LEADERSHIP: Final = Statement("""
SELECT broker_id::text, incarnation, reject_transactional AS is_rejecting, tick_id, snapshot::text,
       extract(epoch FROM clock_timestamp() - tick.at)::double precision AS tick_seconds,
       CASE WHEN lease.expires_at > clock_timestamp() THEN lease.owner::text END AS leader,
       CASE WHEN lease.expires_at > clock_timestamp() THEN lease.lacks ELSE '{{}}' END AS lacks,
       CASE WHEN lease.expires_at <= clock_timestamp()
            THEN extract(epoch FROM clock_timestamp() - lease.expires_at)::double precision END AS gone_seconds,
       CASE WHEN first_due.at < clock_timestamp()
            THEN (extract(epoch FROM clock_timestamp()) - extract(epoch FROM first_due.at))::double precision
       END AS overdue_seconds
FROM {schema}.broker
CROSS JOIN (SELECT tick_id, snapshot, at FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS tick
CROSS JOIN (SELECT min(due_at) AS at FROM {schema}.scheduled) AS first_due
LEFT JOIN {schema}.leader_lease lease ON lease.role = 'sequencer'
""")


def leadership(run: Executor) -> Row:
    """Return whether a process leads now, and what it did last, by a few look-ups of an index.

    `leader`: the owner of the live lease, or None; `gone_seconds`: since its end, None if no process has ever led.
    `lacks`: the parts that the leader lacks. `tick_id`, `snapshot` and `tick_seconds` (the age) are those of the last
    tick. `overdue_seconds`: for how long the oldest due message waits, or None. `is_rejecting`: new transactional
    messages are refused.
    """
    return run.objects(Row, _LEADERSHIP)[0]
