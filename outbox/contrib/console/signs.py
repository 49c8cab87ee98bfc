"""What a page knows about the broker at this moment: whether it answers, is led, and whether its processes are alive.

Every page reads it once. An open page asks for it every second by one small statement, and reads itself again as soon
as something has changed. "No fault" is said only with fresh signs, because counts and conditions come every few seconds
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import duration
from outbox.broker.operations.liveness import is_silent
from outbox.broker.transaction.turns import CHECK_BACK
from outbox.contrib.console.asking import reading
from outbox.contrib.django.operations.known_conditions import observer
from outbox.errors import OutboxError

# How often an open page asks whether something has changed.
CHECK_SECONDS: Final = 1.0

_UNREACHABLE: Final = "unreachable"
_NAMED: Final = 3


# The newest silent process of a group is replaced if one live process has joined since its last sign of life, the next
# one if two have joined, and so on.
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
SELECT clock_timestamp() AS at,
       coalesce((SELECT owner IS NOT NULL AND expires_at > clock_timestamp() FROM {{schema}}.leader_lease
                 WHERE role = 'sequencer'), false) AS leads,
       (SELECT extract(epoch FROM clock_timestamp() - expires_at)::double precision FROM {{schema}}.leader_lease
        WHERE role = 'sequencer') AS leaderless_seconds,
       (SELECT max(summary_id) FROM {{schema}}.summary) AS summary_id,
       (SELECT count(DISTINCT instance_id) FROM process WHERE is_member) AS processes,
       (SELECT max(every_seconds) FROM process WHERE is_member) AS every_seconds,
       (SELECT coalesce(jsonb_agg(jsonb_build_object(
                   'name', name,
                   'seconds', extract(epoch FROM clock_timestamp() - last_at)::double precision,
                   'every_seconds', every_seconds) ORDER BY last_at, name), '[]') FROM missing) AS silent
""")


def liveness(run: Executor) -> Row:
    """Return which processes and check-backs gave a sign of life in time, at `at` by the database's clock.

    `leads`: whether a process leads. `leaderless_seconds`: since the end of the last leader's lease, None if no process
    has ever led. `processes`: the consumer processes whose membership has not ended. `every_seconds`: the longest
    interval between two signs of life of these processes. `silent`: name, seconds and interval (`every_seconds`, if it
    is known) of each process without a sign of life for one and a half intervals, and of each check-back for two,
    unless it was replaced; the longest silence first. `summary_id`: the newest stored summary.
    """
    found = run.objects(Row, _LIVENESS)[0]
    found.silent = [Row(**one) for one in found.silent]
    return found


def _state(found: Row) -> str:
    """A text that differs from an earlier one if a process has come or gone, or a new summary was stored."""
    return f"{found.leads} {found.summary_id} {found.processes} {', '.join(sorted(one.name for one in found.silent))}"


@dataclass(frozen=True, slots=True)
class Signs:
    """`state` differs as soon as a page should be read again. `notice`: what every page must say; '' if all is well.

    `liveness` is None if the broker does not answer, and if it is not in PostgreSQL.
    """

    state: str = ""
    notice: str = ""
    liveness: Row | None = None

    @property
    def doubt(self) -> str:
        """Why nothing may look healthy now, as one sentence without a full stop; '' if nothing is in doubt."""
        found = self.liveness
        if found is None:
            return self.notice and "The broker did not answer"
        if not found.leads:
            return "No process leads the broker"
        if not found.silent:
            return ""
        shown = ", ".join(map(_silence, found.silent[:_NAMED]))
        left = len(found.silent) - _NAMED
        return f"No sign of life from {shown}" + (f", and {left} more" if left > 0 else "")


def _silence(one: Row) -> str:
    every = f"; one is due every {duration(one.every_seconds)}" if one.every_seconds else ""
    return f"{one.name} (for {duration(one.seconds)}{every})"


def read_signs() -> Signs:
    """Read the signs now. The function does not raise if the broker does not answer."""
    try:
        if observer() is not None:
            return Signs()
        with reading() as run:
            found = liveness(run)
    except (OutboxError, psycopg.Error) as error:
        return Signs(_UNREACHABLE, f"It is unknown whether a process leads the broker: {str(error).strip()}")
    return Signs(_state(found), _notice(found), found)


def _notice(found: Row) -> str:
    if found.leads:
        return ""
    seconds = found.leaderless_seconds
    since = "No process has ever led the broker" if seconds is None else f"No process has led for {duration(seconds)}"
    return (
        f"{since}: groups get no new messages, and figures are old. Start a worker: `celery -A app worker --outbox` or "
        "`manage.py outbox_worker`."
    )
