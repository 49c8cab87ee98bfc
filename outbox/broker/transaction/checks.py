"""Check-back on the side of the broker: find the half messages that are due for a check, and apply the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from outbox.broker.database.arrays import integers, texts, uuids
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lifted
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.transaction import half_scan, parking
from outbox.broker.transaction.decisions import record_ends
from outbox.broker.transaction.half_scan import ScanCounts
from outbox.message import stored_message
from outbox.transaction import Answer, Check, CheckSettings, DecidedBy, Decision, EndStatus, EndTransaction
from outbox.utils.safe_text import storable

_MAX_SCANS: Final = 100

# The columns that describe the message and the transaction.
_ASKED_ABOUT: Final = """
SELECT log.transaction_id, coalesce(log.producer_group, '') AS producer_group, log.ledger_id,
       topic.name AS topic, log.body, log.key, log.tag, log.headers, log.content_type, log.deliver_at, log.shard,
       log.born_at, """

# This statement also deletes the `pending_check` rows of transactions that are decided now. The statement that stores a
# decision does not delete `pending_check` rows, so an end message never waits for a row that a check has locked. If a
# check runs before the immunity of its transaction ends, the next check is due when the immunity ends. A batch contains
# parked transactions only if fewer than `limit` other checks are due, so parked transactions never delay other checks.
_CLAIM = Statement(
    """
WITH pending AS MATERIALIZED (
    SELECT transaction_id FROM {schema}.pending_check
    WHERE producer_group = %(group)s AND parked_at IS NULL AND due_at <= now()
    ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), parked AS MATERIALIZED (
    SELECT transaction_id FROM {schema}.pending_check
    WHERE producer_group = %(group)s AND parked_at IS NOT NULL AND due_at <= now()
    ORDER BY due_at LIMIT greatest(0, %(limit)s - (SELECT count(*) FROM pending)) FOR UPDATE SKIP LOCKED
), due AS MATERIALIZED (
    SELECT transaction_id,
           EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = chosen.transaction_id) AS decided
    FROM (TABLE pending UNION ALL TABLE parked) AS chosen
), dropped AS (
    DELETE FROM {schema}.pending_check
    WHERE transaction_id IN (SELECT transaction_id FROM due WHERE decided)
    RETURNING 1
), claimed AS (
    UPDATE {schema}.pending_check
    SET asked_at = now(),
        due_at = CASE WHEN parked_at IS NOT NULL THEN now() + make_interval(secs => %(parked_recheck)s)
                      WHEN now() < immune_until THEN immune_until
                      ELSE now() + make_interval(secs => %(recheck)s) END
    WHERE transaction_id IN (SELECT transaction_id FROM due WHERE NOT decided)
    RETURNING log_id, stored_at, checks, now() >= immune_until AS may_write
)
"""
    + _ASKED_ABOUT
    + """claimed.stored_at,
       (extract(epoch FROM now()) - extract(epoch FROM claimed.stored_at))::double precision AS age_seconds,
       claimed.checks, claimed.may_write, (SELECT count(*) FROM dropped) AS dropped
FROM (SELECT) AS always
LEFT JOIN claimed ON true
LEFT JOIN {schema}.commit_log log USING (log_id)
LEFT JOIN {schema}.topic USING (topic_id)
ORDER BY claimed.stored_at
"""
)

# Reads one undecided transaction, parked or not, in the columns of _CLAIM. The statement claims nothing. The id may be
# that of any message of the transaction; the transaction has the id of its first message.
_UNDECIDED = Statement(
    _ASKED_ABOUT
    + """log.stored_at,
       (extract(epoch FROM now()) - extract(epoch FROM log.stored_at))::double precision AS age_seconds,
       coalesce(pending.checks, 0) AS checks, true AS may_write, 0 AS dropped
FROM {schema}.commit_log log
JOIN {schema}.topic USING (topic_id)
LEFT JOIN {schema}.pending_check pending USING (transaction_id)
WHERE log.message_id = (SELECT transaction_id FROM {schema}.commit_log WHERE message_id = %(id)s) AND log.half
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = log.transaction_id)
"""
)

# This statement parks a transaction after `max_checks` answers that count. `parking.park_overdue` parks a transaction
# because of its age, even if there was no answer.
_POSTPONE = Statement("""
WITH answer AS (
    SELECT transaction_id, counted = 1 AS counts, detail
    FROM unnest(%(ids)s::uuid[], %(counts)s::integer[], %(details)s::text[])
        AS given (transaction_id, counted, detail)
), counted AS (
    SELECT transaction_id, parked_at, detail,
           checks + (answer.counts AND now() >= immune_until)::integer AS checks
    FROM {schema}.pending_check JOIN answer USING (transaction_id)
    WHERE producer_group = %(group)s
    ORDER BY transaction_id FOR UPDATE OF pending_check
), judged AS (
    SELECT *, parked_at IS NULL AND checks >= %(max_checks)s AS parks FROM counted
)
UPDATE {schema}.pending_check pending
SET checks = judged.checks, last_answer = judged.detail,
    parked_at = CASE WHEN parks THEN now() ELSE pending.parked_at END,
    park_reason = CASE WHEN parks THEN 'checks' ELSE park_reason END,
    due_at = CASE WHEN parks THEN now() + make_interval(secs => %(parked_recheck)s) ELSE due_at END
FROM judged WHERE pending.transaction_id = judged.transaction_id
RETURNING pending.transaction_id, pending.checks, judged.parks
""")

_FORGET = Statement("DELETE FROM {schema}.pending_check WHERE transaction_id = ANY(%(ids)s::uuid[])")

_HISTORY = Statement("""
INSERT INTO {schema}.check_history (transaction_id, answer, detail)
SELECT * FROM unnest(%(ids)s::uuid[], %(answers)s::text[], %(details)s::text[])
""")


def _check(row: Row) -> Check:
    headers = row.headers if isinstance(row.headers, dict) else {}
    return Check(
        transaction_id=row.transaction_id,
        producer_group=row.producer_group,
        ledger_id=row.ledger_id,
        message=stored_message(**vars(row) | {"message_id": row.transaction_id, "headers": headers}),
        stored_at=row.stored_at,
        age_seconds=row.age_seconds,
        checks=row.checks,
        may_write=row.may_write,
    )


def scan(run: Executor, *, settings: CheckSettings, batch: int = half_scan.DEFAULT_BATCH) -> ScanCounts:
    """Scan for new undecided half messages until no backlog is left, in at most 100 passes."""
    scanned = moved = 0
    for _ in range(_MAX_SCANS):
        counts = half_scan.scan_halves(run, immunity_seconds=settings.immunity_seconds, batch=batch)
        scanned, moved = scanned + counts.scanned, moved + counts.moved
        if not counts.more:
            break
    half_scan.drop_decided_parked(run)
    return ScanCounts(scanned, moved, counts.more)


def claim_checks(
    run: Executor, producer_group: str, *, limit: int, settings: CheckSettings, starts: bool = False
) -> list[Check]:
    """Scan, then claim up to `limit` due checks of the group.

    No other process gets these checks before the recheck time has passed. `starts`: this process claims checks of the
    group for the first time. If `starts` is true, or if no process of the group has claimed checks for
    GROUP_AWAY_SECONDS, the group's parked transactions become due at once. Parked transactions whose last check was
    less than GROUP_AWAY_SECONDS ago are left out.
    """
    scan(run, settings=settings)
    was_away = parking.note_asking(run, producer_group)
    if was_away or starts:
        parking.ask_parked(run, producer_group)
    parameters = {
        "group": producer_group,
        "limit": limit,
        "recheck": settings.recheck_seconds,
        "parked_recheck": settings.parked_recheck_seconds,
    }
    while True:
        with lifted(run.connection):
            # The statement is not prepared, because a good plan needs the values of the parameters.
            rows = run.objects(Row, _CLAIM, parameters, prepare=False)
        checks = [_check(row) for row in rows if row.transaction_id is not None]
        # If all transactions of this batch were already decided, more transactions may be due, so the loop claims
        # again.
        if checks or not rows[0].dropped:
            return checks


def find_undecided(run: Executor, message_or_transaction_id: UUID) -> Check | None:
    """Return a check that may write a tombstone, for an operator; None if the transaction is not undecided."""
    found = run.objects(Row, _UNDECIDED, {"id": message_or_transaction_id})
    return _check(found[0]) if found else None


def report_answers(
    run: Executor, producer_group: str, answers: Sequence[Answer], *, settings: CheckSettings
) -> list[EndStatus | None]:
    """Apply a checker's answers in one transaction, and return one status per answer; None for UNKNOWN.

    An answer UNKNOWN uses up one of the `max_checks` if its field `counts` is true and the immunity has ended. After
    `max_checks` counted answers, the transaction is parked.
    """
    with lifted(run.connection):
        known = [answer for answer in answers if answer.decision is not Decision.UNKNOWN]
        statuses = dict(zip(map(id, known), _decide(run, producer_group, known), strict=True))
        unknown = [answer for answer in answers if answer.decision is Decision.UNKNOWN]
        parked = _postpone(run, producer_group, unknown, settings)
        _remember(run, answers)
        alarms = [
            Incident(IncidentKind.WRONG_LEDGER, str(answer.transaction_id), answer.detail)
            for answer in answers
            if answer.alarm
        ]
        # Each further check of a transaction finds the same.
        incidents.record_once(run, alarms)
        incidents.record(run, parked)
    return [statuses.get(id(answer)) for answer in answers]


def _decide(run: Executor, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus]:
    ends = [
        EndTransaction(
            transaction_id=answer.transaction_id,
            decision=answer.decision,
            producer_group=producer_group,
            decided_by=DecidedBy.CHECK,
        )
        for answer in answers
    ]
    statuses = record_ends(run, ends)
    decided = [
        end.transaction_id for end, status in zip(ends, statuses, strict=True) if status is not EndStatus.REFUSED
    ]
    if decided:
        run.execute(_FORGET, {"ids": uuids(decided)})
    return statuses


def _postpone(run: Executor, producer_group: str, answers: Sequence[Answer], settings: CheckSettings) -> list[Incident]:
    if not answers:
        return []
    parameters = {
        "group": producer_group,
        "ids": uuids([answer.transaction_id for answer in answers]),
        "counts": integers([int(answer.counts) for answer in answers]),
        "details": texts([storable(answer.detail) for answer in answers]),
        "max_checks": settings.max_checks,
        "parked_recheck": settings.parked_recheck_seconds,
    }
    return [
        Incident(
            IncidentKind.PARKED,
            str(transaction_id),
            f"checks: group {producer_group!r} did not know the outcome in {checks} checks. The group is asked "
            f"again every {settings.parked_recheck_seconds:g} s. An end message or an operator can also decide",
        )
        for transaction_id, checks, parks in run.rows(_POSTPONE, parameters)
        if parks
    ]


def _remember(run: Executor, answers: Sequence[Answer]) -> None:
    run.execute(
        _HISTORY,
        {
            "ids": uuids([answer.transaction_id for answer in answers]),
            "answers": texts([answer.decision.name for answer in answers]),
            "details": texts([storable(answer.detail) for answer in answers]),
        },
    )
