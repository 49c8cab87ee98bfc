"""Park transactions that check-back has not decided in time. Parked transactions can still be decided.

          scan                 claimed by its group, immunity over
HALF ───────────► PENDING ◄──────────────────────────────────┐
                   │   │                                     │ UNKNOWN: again after recheck_seconds
                   │   └── asked ────────────────────────────┘
                   │
                   │ max_checks answers that count (checks.report_answers): reason `checks`
                   │ or max_age_seconds after immunity (park_overdue):      reason `unanswered` or `age`
                   ▼
                 PARKED ── asked: every parked_recheck_seconds; when its group comes back; when a process of the
                   │       group starts; on request (hint_checks). UNKNOWN: stays parked
                   ▼
    from every state, once: COMMIT or ROLLBACK by an end message, a check, or an operator ──► DECIDED

A parked transaction is still checked, because a service that was switched off for a weekend answers later. Time parks
it too: a producer group without a running process never answers, and a condition has to name it.
"""

from __future__ import annotations

from typing import Final

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lifted
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.transaction import GROUP_AWAY_SECONDS, CheckSettings, ParkReason

_BATCH: Final = 1000

# The age of a transaction counts from the end of its immunity, so a long immunity does not lead to parking. The
# statement skips rows that a check has locked; the next pass reads these rows. If no process of the producer group asks
# for checks, the parked transaction is due at once, so the next process of the group checks the transaction.
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

# The time in `seen_at` is written at most once in ten seconds, so that the processes of a group seldom wait for each
# other's row lock. So `seen_at` may be ten seconds too old, which does no harm.
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

_ASK_PARKED = Statement("""
WITH chosen AS (
    SELECT transaction_id FROM {schema}.pending_check pending
    WHERE producer_group = %(group)s AND parked_at IS NOT NULL
      AND coalesce(asked_at < now() - make_interval(secs => %(away)s), true)
      AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
    ORDER BY transaction_id FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.pending_check pending SET due_at = least(due_at, now())
FROM chosen WHERE pending.transaction_id = chosen.transaction_id
""")


def _incident(one: Row) -> Incident:
    if one.reason == ParkReason.UNANSWERED:
        since = f"since {one.seen_at:%Y-%m-%d %H:%M:%S%z}" if one.seen_at else "ever"
        why = (
            f"unanswered: no producer of group {one.producer_group!r} has asked for checks {since}. Start a "
            f"worker of this group with check-back: it checks this transaction at once"
        )
    else:
        why = (
            f"age: group {one.producer_group!r} asks for checks, but its checker does not know the outcome. "
            f"{one.checks} answers counted. The last answer was: {one.last_answer or 'none'}"
        )
    return Incident(
        IncidentKind.PARKED,
        str(one.transaction_id),
        f"{why}. An end message or an operator can also decide",
    )


def park_overdue(run: Executor, *, settings: CheckSettings) -> int:
    """Park transactions that are undecided `max_age_seconds` after the end of their immunity. Return the number of
    parked transactions.

    Each parked transaction is recorded as an incident with the reason. This function runs as a pass of maintenance,
    without a producer, so it also reports a transaction whose producer group has no running process.
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
            parked = run.objects(Row, _PARK_OVERDUE, parameters)
            incidents.record(run, [_incident(one) for one in parked])
        total += len(parked)
        if len(parked) < _BATCH:
            return total


def note_asking(run: Executor, producer_group: str) -> bool:
    """Record that the group asks for checks now, and return whether the group was away before.

    A group was away if its previous request is older than GROUP_AWAY_SECONDS, or if it has never asked for checks.
    """
    with lifted(run.connection):
        [was_away] = run.one(_NOTE_ASKING, {"group": producer_group, "away": GROUP_AWAY_SECONDS})
    return bool(was_away)


def ask_parked(run: Executor, producer_group: str) -> None:
    """Make the parked transactions of a group due now, except those asked in the last GROUP_AWAY_SECONDS."""
    with lifted(run.connection):
        run.execute(_ASK_PARKED, {"group": producer_group, "away": GROUP_AWAY_SECONDS})
