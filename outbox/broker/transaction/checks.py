"""Check-back on the broker's side: which half transactions are due, and what became of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.arrays import cursor_on, integers, texts, uuids
from outbox.broker.database.connection import Connection
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lifted
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.transaction import half_scan
from outbox.broker.transaction.decisions import record_ends
from outbox.broker.transaction.half_scan import ScanCounts
from outbox.message import Message
from outbox.transaction import Answer, Check, CheckSettings, DecidedBy, Decision, EndStatus, EndTransaction

_MAX_SCANS: Final = 100


# Rows decided meanwhile are dropped here instead of when they are decided: an end message touches no row that
# a check may hold. A hinted check before immunity ends comes again when it has ended.
_CLAIM = Statement("""
WITH due AS MATERIALIZED (
    SELECT transaction_id,
           EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id) AS decided
    FROM {schema}.pending_check pending
    WHERE producer_group = %(group)s AND parked_at IS NULL AND due_at <= now()
    ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM {schema}.pending_check
    WHERE transaction_id IN (SELECT transaction_id FROM due WHERE decided)
    RETURNING 1
), claimed AS (
    UPDATE {schema}.pending_check
    SET due_at = CASE WHEN now() < immune_until THEN immune_until
                      ELSE now() + make_interval(secs => %(recheck)s) END
    WHERE transaction_id IN (SELECT transaction_id FROM due WHERE NOT decided)
    RETURNING log_id, stored_at, checks, now() >= immune_until AS may_write
)
SELECT (SELECT count(*) FROM dropped), log.transaction_id, log.ledger_id, log.checker, topic.name, log.body, log.key,
       log.tag, log.headers, log.content_type, log.deliver_at, log.shard, log.born_at, claimed.stored_at,
       extract(epoch FROM now() - claimed.stored_at)::double precision, claimed.checks, claimed.may_write
FROM (SELECT) AS always
LEFT JOIN claimed ON true
LEFT JOIN {schema}.commit_log log USING (log_id)
LEFT JOIN {schema}.topic USING (topic_id)
ORDER BY claimed.stored_at
""")

# As in _CLAIM, of one transaction, parked or not, claiming nothing.
_UNDECIDED = Statement("""
SELECT log.transaction_id, log.ledger_id, log.checker, topic.name, log.body, log.key,
       log.tag, log.headers, log.content_type, log.deliver_at, log.shard, log.born_at, log.stored_at,
       extract(epoch FROM now() - log.stored_at)::double precision, coalesce(pending.checks, 0), true,
       coalesce(log.producer_group, '')
FROM {schema}.commit_log log
JOIN {schema}.topic USING (topic_id)
LEFT JOIN {schema}.pending_check pending USING (transaction_id)
WHERE log.message_id = %(id)s AND log.half
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = log.transaction_id)
""")

_POSTPONE = Statement("""
UPDATE {schema}.pending_check pending
SET checks = pending.checks + (answer.counts AND now() >= immune_until)::integer,
    last_answer = answer.detail,
    parked_at = CASE WHEN pending.checks + (answer.counts AND now() >= immune_until)::integer >= %(max_checks)s
                       OR now() - stored_at >= make_interval(secs => %(max_age)s) THEN now() END
FROM (SELECT transaction_id, counts = 1 AS counts, detail
      FROM unnest(%(ids)s::uuid[], %(counts)s::integer[], %(details)s::text[])
           AS given (transaction_id, counts, detail)) AS answer
WHERE pending.transaction_id = answer.transaction_id AND producer_group = %(group)s AND parked_at IS NULL
RETURNING pending.transaction_id, pending.checks, pending.parked_at
""")

_FORGET = Statement("DELETE FROM {schema}.pending_check WHERE transaction_id = ANY(%(ids)s::uuid[])")

_HISTORY = Statement("""
INSERT INTO {schema}.check_history (transaction_id, answer, detail)
SELECT * FROM unnest(%(ids)s::uuid[], %(answers)s::text[], %(details)s::text[])
""")


def scan(
    connection: Connection, schema: str, *, settings: CheckSettings, batch: int = half_scan.DEFAULT_BATCH
) -> ScanCounts:
    """Scan for new undecided half transactions until there is no backlog, at most 100 passes."""
    scanned = moved = 0
    for _ in range(_MAX_SCANS):
        counts = half_scan.scan_halves(connection, schema, immunity_seconds=settings.immunity_seconds, batch=batch)
        scanned, moved = scanned + counts.scanned, moved + counts.moved
        if not counts.more:
            break
    half_scan.drop_decided_parked(connection, schema)
    return ScanCounts(scanned, moved, counts.more)


def claim_checks(
    connection: Connection, schema: str, producer_group: str, *, limit: int, settings: CheckSettings
) -> list[Check]:
    """Scan, then claim up to `limit` due checks of the group: nobody else gets them before the recheck time."""
    scan(connection, schema, settings=settings)
    while True:
        dropped, checks = _claim(connection, schema, producer_group, limit, settings)
        if checks or not dropped:
            return checks


def _claim(
    connection: Connection, schema: str, producer_group: str, limit: int, settings: CheckSettings
) -> tuple[int, list[Check]]:
    parameters = {"group": producer_group, "limit": limit, "recheck": settings.recheck_seconds}
    with lifted(connection), cursor_on(connection) as cursor:
        rows = cursor.execute(_CLAIM.on(schema), parameters, prepare=False).fetchall()
    return rows[0][0], [_check(producer_group, row[1:]) for row in rows if row[1] is not None]


def _check(producer_group: str, row: tuple[Any, ...]) -> Check:
    transaction_id, ledger_id, checker, topic, body, key, tag, headers, content_type = row[:9]
    deliver_at, shard, born_at, stored_at, age_seconds, checks, may_write = row[9:]
    message = Message(
        topic=topic,
        body=body,
        message_id=transaction_id,
        key=key,
        tag=tag,
        headers=headers or {},
        content_type=content_type,
        deliver_at=deliver_at,
        shard=shard,
        born_at=born_at,
    )
    return Check(
        transaction_id=transaction_id,
        producer_group=producer_group,
        ledger_id=ledger_id,
        checker=checker or "",
        message=message,
        stored_at=stored_at,
        age_seconds=age_seconds,
        checks=checks,
        may_write=may_write,
    )


def find_undecided(connection: Connection, schema: str, transaction_id: UUID) -> Check | None:
    """An undecided half transaction as a check that may write, for an operator; None when there is no such."""
    with cursor_on(connection) as cursor:
        row = cursor.execute(_UNDECIDED.on(schema), {"id": transaction_id}).fetchone()
    return None if row is None else _check(row[-1], row[:-1])


def report_answers(
    connection: Connection,
    schema: str,
    producer_group: str,
    answers: Sequence[Answer],
    *,
    settings: CheckSettings,
) -> list[EndStatus | None]:
    """Apply what a checker said, in one transaction; one status per answer, None for UNKNOWN.

    UNKNOWN uses up a check when the answer counts and immunity is over; past the limits it parks.
    """
    with lifted(connection):
        known = [answer for answer in answers if answer.decision is not Decision.UNKNOWN]
        statuses = dict(zip(map(id, known), _decide(connection, schema, producer_group, known), strict=True))
        unknown = [answer for answer in answers if answer.decision is Decision.UNKNOWN]
        parked = _postpone(connection, schema, producer_group, unknown, settings)
        _remember(connection, schema, answers)
        alarms = [
            Incident(IncidentKind.ALARM, str(answer.transaction_id), answer.detail)
            for answer in answers
            if answer.alarm
        ]
        incidents.record(connection, schema, [*alarms, *parked])
    return [statuses.get(id(answer)) for answer in answers]


def _decide(connection: Connection, schema: str, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus]:
    ends = [
        EndTransaction(
            transaction_id=answer.transaction_id,
            decision=answer.decision,
            producer_group=producer_group,
            decided_by=DecidedBy.CHECK,
        )
        for answer in answers
    ]
    statuses = record_ends(connection, schema, ends)
    decided = [
        end.transaction_id for end, status in zip(ends, statuses, strict=True) if status is not EndStatus.REFUSED
    ]
    if decided:
        with cursor_on(connection) as cursor:
            cursor.execute(_FORGET.on(schema), {"ids": uuids(decided)})
    return statuses


def _postpone(
    connection: Connection, schema: str, producer_group: str, answers: Sequence[Answer], settings: CheckSettings
) -> list[Incident]:
    if not answers:
        return []
    parameters = {
        "group": producer_group,
        "ids": uuids([answer.transaction_id for answer in answers]),
        "counts": integers([int(answer.counts) for answer in answers]),
        "details": texts([_clean(answer.detail) for answer in answers]),
        "max_checks": settings.max_checks,
        "max_age": settings.max_age_seconds,
    }
    with cursor_on(connection) as cursor:
        rows: list[tuple[UUID, int, datetime | None]] = cursor.execute(_POSTPONE.on(schema), parameters).fetchall()
    return [
        Incident(
            IncidentKind.PARKED,
            str(transaction_id),
            f"group {producer_group!r} could not say after {checks} checks; an operator or a late end decides",
        )
        for transaction_id, checks, parked_at in rows
        if parked_at is not None
    ]


def _remember(connection: Connection, schema: str, answers: Sequence[Answer]) -> None:
    with cursor_on(connection) as cursor:
        cursor.execute(
            _HISTORY.on(schema),
            {
                "ids": uuids([answer.transaction_id for answer in answers]),
                "answers": texts([answer.decision.name for answer in answers]),
                "details": texts([_clean(answer.detail) for answer in answers]),
            },
        )


def _clean(detail: str) -> str:
    return detail.replace("\x00", "")


def hint_checks(connection: Connection, schema: str, ids: Sequence[UUID], *, settings: CheckSettings) -> int:
    """Make undecided half transactions due now; before immunity ends their check only reads."""
    return half_scan.hint_checks(connection, schema, list(ids), immunity_seconds=settings.immunity_seconds)
