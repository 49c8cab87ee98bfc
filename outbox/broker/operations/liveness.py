"""Signs of life: whether a process leads, and which processes and check-backs gave no sign of life in time.

`liveness` is one small statement, because an open operations page sends it every second. The rules (`rules.py`) read
more, and some of their conditions hold only after several intervals.

"No fault" is said only with fresh signs: before, the overview was green in the first seconds of a fault, because counts
and conditions come every few seconds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.transaction.turns import CHECK_BACK


def is_silent(member: LiteralString) -> LiteralString:
    """Return the SQL text for "the process gave no sign of life for one and a half of its intervals".

    A process renews its membership three times per term, so half a term is one and a half intervals. `member` has the
    end of the membership, and `known` is `consumer_process`.
    """
    return f"coalesce(clock_timestamp() > known.seen_at + ({member}.expires_at - known.seen_at) / 2, false)"


# The newest silent process of a group is replaced if one live process has joined since its last sign of life, the next
# one if two have joined, and so on. A process that has vanished for more than an hour is not listed any more.
_LIVENESS: Final = Statement(f"""
WITH process AS MATERIALIZED (
    SELECT consumer.group_id, instance_id, host, pid, joined_at, expires_at > clock_timestamp() AS is_member,
           expires_at <= clock_timestamp() OR {is_silent("consumer")} AS is_silent,
           coalesce(known.seen_at, least(expires_at, clock_timestamp())) AS last_at,
           extract(epoch FROM expires_at - known.seen_at)::double precision / 3 AS every_seconds
    FROM {{schema}}.consumer LEFT JOIN {{schema}}.consumer_process known USING (instance_id)
    WHERE expires_at > clock_timestamp() - interval '1 hour'
), silent AS (
    SELECT *, row_number() OVER (PARTITION BY group_id ORDER BY last_at DESC) AS place FROM process WHERE is_silent
), missing AS (
    SELECT DISTINCT ON (instance_id) 'process ' || pid || ' on ' || host AS name, last_at, every_seconds
    FROM silent
    WHERE place > (SELECT count(*) FROM process other
                   WHERE other.group_id = silent.group_id AND NOT other.is_silent AND other.joined_at > silent.last_at)
    UNION ALL
    -- A process that starts waits for an interval before its first pass, so two intervals may lie between two passes.
    SELECT 'check-back of ' || producer_group, began_at, interval_seconds
    FROM {{schema}}.periodic_pass
    WHERE name = '{CHECK_BACK}' AND began_at < clock_timestamp() - make_interval(secs => 2 * interval_seconds)
)
SELECT clock_timestamp(),
       coalesce((SELECT owner IS NOT NULL AND expires_at > clock_timestamp() FROM {{schema}}.leader_lease
                 WHERE role = 'sequencer'), false),
       (SELECT extract(epoch FROM clock_timestamp() - expires_at)::double precision FROM {{schema}}.leader_lease
        WHERE role = 'sequencer'),
       (SELECT max(summary_id) FROM {{schema}}.summary),
       (SELECT count(DISTINCT instance_id) FROM process WHERE is_member),
       (SELECT max(every_seconds) FROM process WHERE is_member),
       (SELECT coalesce(jsonb_agg(jsonb_build_object(
                   'name', name,
                   'seconds', extract(epoch FROM clock_timestamp() - last_at)::double precision,
                   'every_seconds', every_seconds) ORDER BY last_at, name), '[]') FROM missing)
""")


@dataclass(frozen=True, slots=True)
class Liveness:
    """Which processes and check-backs gave a sign of life in time, at `at` by the database's clock.

    `leaderless_seconds`: for how long no process has led; 0.0 if a process leads, and None if no process has ever led.
    `processes`: the consumer processes whose membership has not ended. `every_seconds`: the longest interval between
    two signs of life of these processes. `silent`: name, seconds and interval (`every_seconds`, if it is known) of each
    process without a sign of life for one and a half intervals, and of each check-back for two, unless it was replaced;
    the longest silence first. `summary_id`: the newest stored summary.
    """

    at: datetime
    leads: bool
    leaderless_seconds: float | None
    summary_id: int | None
    processes: int
    every_seconds: float | None
    silent: Sequence[Row]

    @property
    def state(self) -> str:
        """A text that differs from an earlier one if a process has come or gone, or a new summary was stored."""
        return f"{self.leads} {self.summary_id} {self.processes} {', '.join(sorted(one.name for one in self.silent))}"


def liveness(run: Executor) -> Liveness:
    """Read which processes and check-backs have given a sign of life in time."""
    at, leads, leaderless_seconds, summary_id, processes, every_seconds, silent = run.one(_LIVENESS)
    return Liveness(
        at,
        leads,
        0.0 if leads else leaderless_seconds,
        summary_id,
        processes,
        every_seconds,
        [Row(**one) for one in silent],
    )


_LEADERSHIP: Final = Statement("""
SELECT broker_id::text, incarnation, reject_transactional AS is_rejecting, tick_id, snapshot::text,
       extract(epoch FROM clock_timestamp() - tick.at)::double precision AS tick_seconds,
       CASE WHEN lease.expires_at > clock_timestamp() THEN lease.owner::text END AS leader,
       CASE WHEN lease.expires_at > clock_timestamp() THEN lease.lacks ELSE '{{}}' END AS lacks,
       CASE WHEN lease.expires_at <= clock_timestamp()
            THEN extract(epoch FROM clock_timestamp() - lease.expires_at)::double precision END AS gone_seconds,
       CASE WHEN first_due.at < clock_timestamp()
            THEN extract(epoch FROM clock_timestamp() - first_due.at)::double precision END AS overdue_seconds
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
