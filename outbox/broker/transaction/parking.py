"""Park half transactions that check-back has not settled in time, until they are decided later.

          scan                 claimed by its group, immunity over
HALF ───────────► PENDING ◄──────────────────────────────────┐
                   │   │                                     │ UNKNOWN: again after recheck_seconds
                   │   └── asked ────────────────────────────┘
                   │
                   │ max_checks answers that count (checks.report_answers): reason `checks`
                   │ or max_age_seconds after immunity (park_overdue):      reason `unanswered` or `age`
                   ▼
                 PARKED ── asked: every parked_recheck_seconds; when its group comes back; when a process of the
                   │       group starts; on request (resume_checks, hint_checks). UNKNOWN: stays parked
                   ▼
    from every state, once: COMMIT or ROLLBACK by an end message, a check, or an operator ──► DECIDED

See decision 060.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lifted
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.transaction import GROUP_AWAY_SECONDS, CheckSettings, ParkReason

_BATCH: Final = 1000

# The age counts from the end of immunity, so a long immunity does not lead to parking. The statement skips rows that a
# check has locked; the next pass sees them. If no process of its group asks for checks, a parked transaction is due at
# once. So the next process of the group asks about it.
_PARK_OVERDUE = Statement("""
WITH overdue AS MATERIALIZED (
    SELECT transaction_id, coalesce(seen_at < now() - make_interval(secs => %(away)s), true) AS unanswered, seen_at
    FROM {schema}.pending_check pending
    LEFT JOIN {schema}.producer_group asking ON asking.name = pending.producer_group
    WHERE parked_at IS NULL AND immune_until < now() - make_interval(secs => %(max_age)s)
      AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
    ORDER BY transaction_id LIMIT %(batch)s FOR UPDATE OF pending SKIP LOCKED
)
UPDATE {schema}.pending_check pending
SET parked_at = now(), park_reason = CASE WHEN unanswered THEN 'unanswered' ELSE 'age' END,
    due_at = CASE WHEN unanswered THEN now() ELSE now() + make_interval(secs => %(recheck)s) END
FROM overdue WHERE pending.transaction_id = overdue.transaction_id
RETURNING pending.transaction_id, pending.producer_group, park_reason AS reason, checks, last_answer, seen_at
""")

# A group has at most one note per ten seconds, which is exact enough. So its processes do not wait for each other's
# row.
_NOTE_ASKING = Statement("""
WITH before AS (
    SELECT seen_at FROM {schema}.producer_group WHERE name = %(group)s
), noted AS (
    INSERT INTO {schema}.producer_group (name, seen_at)
    SELECT %(group)s, now() WHERE coalesce((SELECT seen_at FROM before) < now() - interval '10 s', true)
    ON CONFLICT (name) DO UPDATE SET seen_at = now()
)
SELECT coalesce((SELECT seen_at FROM before) < now() - make_interval(secs => %(away)s), true)
""")

# `lately`: leave out transactions about which a process has asked within this many seconds. 0 leaves out none.
_ASK_PARKED = Statement("""
WITH chosen AS (
    SELECT transaction_id FROM {schema}.pending_check pending
    WHERE producer_group = %(group)s AND parked_at IS NOT NULL
      AND coalesce(asked_at < now() - make_interval(secs => %(lately)s), true)
      AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
    ORDER BY transaction_id FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.pending_check pending SET due_at = least(due_at, now())
FROM chosen WHERE pending.transaction_id = chosen.transaction_id
""")


@dataclass(frozen=True, slots=True)
class _Parked:
    transaction_id: UUID
    producer_group: str
    reason: str
    checks: int
    last_answer: str | None
    seen_at: datetime | None

    def incident(self) -> Incident:
        if self.reason == ParkReason.UNANSWERED:
            since = f"since {self.seen_at:%Y-%m-%d %H:%M:%S%z}" if self.seen_at else "ever"
            why = (
                f"unanswered: no producer of group {self.producer_group!r} has asked for its checks {since}; start one "
                f"with check-back, which asks about it at once"
            )
        else:
            why = (
                f"age: group {self.producer_group!r} asks, but its checker does not know the answer; {self.checks} "
                f"answers counted, the last one was: {self.last_answer or 'none'}"
            )
        return Incident(
            IncidentKind.PARKED, str(self.transaction_id), f"{why}. A late end or an operator also decides it"
        )


def park_overdue(run: Executor, *, settings: CheckSettings) -> int:
    """Park transactions still undecided `max_age_seconds` after their immunity; returns how many.

    Each one leaves an incident with the reason. This function is a pass of maintenance. It needs no producer, so it
    also reports a transaction whose group has no running process.
    """
    parameters = {
        "away": GROUP_AWAY_SECONDS,
        "max_age": settings.max_age_seconds,
        "recheck": settings.parked_recheck_seconds,
        "batch": _BATCH,
    }
    total = 0
    while True:
        with lifted(run.connection):
            parked = run.objects(_Parked, _PARK_OVERDUE, parameters)
            incidents.record(run, [one.incident() for one in parked])
        total += len(parked)
        if len(parked) < _BATCH:
            return total


def note_asking(run: Executor, producer_group: str) -> bool:
    """Record that a process of the group asks for checks now; returns whether the group had not asked for a while."""
    with lifted(run.connection):
        [was_away] = run.one(_NOTE_ASKING, {"group": producer_group, "away": GROUP_AWAY_SECONDS})
    return bool(was_away)


def ask_parked(run: Executor, producer_group: str, *, lately_seconds: float = 0.0) -> int:
    """Make the parked transactions of a group due for a check now; returns how many.

    Transactions about which a process has asked within `lately_seconds` are left out.
    """
    with lifted(run.connection):
        return run.count(_ASK_PARKED, {"group": producer_group, "lately": lately_seconds})
