"""End messages: record decisions in the op log. A transaction's first decision is final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.broker.database.arrays import texts, uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.sender import first_row
from outbox.broker.database.statement import TEXT, UUID_, Request, Statement
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.errors import UsageError
from outbox.transaction import DecidedBy, Decision, EndStatus, EndTransaction

# The caller passes no log ids: this statement finds the messages of each transaction in the log, after the outcome of
# the local transaction is known. So the caller can neither add a message to the decision nor omit a message. The
# statement sorts by transaction id, because inserts that may conflict must lock in one order.
_DECIDE = Statement("""
WITH given AS (
    SELECT * FROM unnest(%(ids)s::uuid[], %(decisions)s::text[], %(deciders)s::text[], %(groups)s::text[])
        AS given (transaction_id, decision, decided_by, producer_group)
), known AS (
    SELECT given.*, half.xid AS half_xid, half.ledger_id,
           half.producer_group IS NOT DISTINCT FROM given.producer_group AS accepted
    FROM given JOIN {schema}.commit_log half ON half.message_id = given.transaction_id
        AND half.transaction_id = half.message_id AND half.half
), decided AS (
    INSERT INTO {schema}.op_log (transaction_id, decision, decided_by, relaxed, log_ids)
    SELECT known.transaction_id, known.decision::"char", known.decided_by::"char",
           -- If a crash loses the end message, the ledger gives the same answer.
           (known.decided_by <> 'P' OR known.ledger_id IS NULL)
               AND current_setting('synchronous_commit') NOT IN ('on', 'remote_apply'),
           ARRAY(SELECT log_id FROM {schema}.commit_log rows
                 WHERE rows.half AND rows.xid = known.half_xid AND rows.transaction_id = known.transaction_id
                 ORDER BY log_id)
    FROM known WHERE accepted ORDER BY known.transaction_id
    ON CONFLICT (transaction_id) DO NOTHING
    RETURNING transaction_id
)
SELECT known.transaction_id, known.producer_group, known.accepted, decided.transaction_id IS NOT NULL
FROM known LEFT JOIN decided USING (transaction_id)
CROSS JOIN (SELECT set_config(
    'synchronous_commit',
    CASE WHEN %(durable)s OR EXISTS (SELECT FROM known WHERE accepted AND ledger_id IS NULL)
         THEN current_setting('synchronous_commit') ELSE 'off' END,
    true
) AS synchronous_commit) AS durability
""")

# Records one end message whose sender does not wait for the answer. The SQL function also records contradictions and
# refusals. Like _DECIDE, the function chooses whether its commit waits for the disk.
_END_ONE = Statement('SELECT {schema}.record_end($1, $2::"char", $3)', (UUID_, TEXT, TEXT), (TEXT,))

# OFFSET 0 makes PostgreSQL look up each id by index, and keeps the planner from reading the whole table for some
# thousand ids.
_STANDING = Statement("""
SELECT transaction_id, decision::text
FROM unnest(%(ids)s::uuid[]) AS given (id)
CROSS JOIN LATERAL (SELECT transaction_id, decision FROM {schema}.op_log WHERE transaction_id = given.id OFFSET 0) AS op
""")

_GROUPS = Statement("""
SELECT message_id, coalesce(producer_group, ''), half FROM {schema}.commit_log WHERE message_id = ANY(%(ids)s::uuid[])
""")


# Transaction id and producer group.
_Key = tuple[UUID, str]


def _key(end: EndTransaction) -> _Key:
    return end.transaction_id, end.producer_group


@dataclass(frozen=True, slots=True)
class _Outcome:
    accepted: bool
    applied: bool


def record_ends(run: Executor, ends: Sequence[EndTransaction]) -> list[EndStatus]:
    """Record decisions, and return one status per end message, in order.

    An end message that contradicts the decision or is refused is recorded as an incident.
    """
    if not ends:
        return []
    # The first end message per transaction and group: an end message of a wrong group must not block an end message of
    # the right group in the same batch.
    firsts: dict[_Key, EndTransaction] = {}
    for end in ends:
        if end.decision is Decision.UNKNOWN:
            raise UsageError(f"transaction {end.transaction_id}: UNKNOWN is no outcome; report COMMIT or ROLLBACK.")
        firsts.setdefault(_key(end), end)
    outcomes = _decide(run, list(firsts.values()))
    repeated = [key[0] for key in firsts if (found := outcomes.get(key)) and found.accepted and not found.applied]
    standing = standing_decisions(run, repeated)
    statuses = [_status(end, firsts[_key(end)], outcomes.get(_key(end)), standing) for end in ends]
    incidents.record(run, _incidents(run, ends, statuses))
    return statuses


def record_end(run: Executor, end: EndTransaction) -> EndStatus:
    """Do the same as `record_ends` for one end message. For a producer's end, EXECUTE on a function is enough."""
    if end.decided_by is not DecidedBy.PRODUCER or end.decision is Decision.UNKNOWN:
        return record_ends(run, [end])[0]
    row = first_row(run, _END_ONE, _values(end))
    assert row is not None
    return EndStatus(row[0])


def end_request(schema: str, end: EndTransaction) -> Request:
    """Return a producer's end message as a request for a sender that does not wait for the answer."""
    return _END_ONE.request(schema, _values(end), f"the end message of transaction {end.transaction_id}")


def _values(end: EndTransaction) -> tuple[UUID, str, str]:
    # psycopg would send the name of an Enum member.
    return end.transaction_id, end.decision.value, end.producer_group


def standing_decisions(run: Executor, ids: Sequence[UUID]) -> dict[UUID, Decision]:
    """Return the final decisions by transaction id; undecided transactions are left out."""
    if not ids:
        return {}
    rows = run.rows(_STANDING, {"ids": uuids(ids)})
    return {transaction_id: Decision(decision) for transaction_id, decision in rows}


_FLUSH = Statement("SELECT set_config('synchronous_commit', 'on', true), pg_logical_emit_message(true, 'outbox', '')")


def flush(run: Executor) -> None:
    """Wait until all data that the caller has seen is on the disk. End messages and ticks do not wait for the disk.

    Call this before you delete rows of a ledger or inbox which the broker would need again after a crash of its server.
    """
    run.execute(_FLUSH)


def _decide(run: Executor, ends: Sequence[EndTransaction]) -> dict[_Key, _Outcome]:
    parameters = {
        "ids": uuids([end.transaction_id for end in ends]),
        "decisions": texts([end.decision for end in ends]),
        "deciders": texts([end.decided_by for end in ends]),
        "groups": texts([end.producer_group for end in ends]),
        # The commit of a producer's end message does not wait for the disk, because a check-back asks the ledger again
        # after a crash of the server. If the producer has no ledger, the answer of the check may differ, so the commit
        # waits for the disk.
        "durable": any(end.decided_by is not DecidedBy.PRODUCER for end in ends),
    }
    rows = run.rows(_DECIDE, parameters, prepare=True)
    return {
        (transaction_id, producer_group): _Outcome(accepted, applied)
        for transaction_id, producer_group, accepted, applied in rows
    }


def _status(
    end: EndTransaction, first: EndTransaction, outcome: _Outcome | None, standing: dict[UUID, Decision]
) -> EndStatus:
    if outcome is None or not outcome.accepted:
        return EndStatus.REFUSED
    if outcome.applied:
        if end is first:
            return EndStatus.APPLIED
        return EndStatus.REPEATED if end.decision is first.decision else EndStatus.CONTRADICTED
    return EndStatus.REPEATED if standing.get(end.transaction_id) is end.decision else EndStatus.CONTRADICTED


def _incidents(run: Executor, ends: Sequence[EndTransaction], statuses: Sequence[EndStatus]) -> list[Incident]:
    wrong = [
        (end, status)
        for end, status in zip(ends, statuses, strict=True)
        if status in (EndStatus.CONTRADICTED, EndStatus.REFUSED)
    ]
    if not wrong:
        return []
    ids = uuids([end.transaction_id for end, _ in wrong])
    stored = {message_id: (group, half) for message_id, group, half in run.rows(_GROUPS, {"ids": ids})}
    return [_incident(end, status, stored.get(end.transaction_id)) for end, status in wrong]


def _incident(end: EndTransaction, status: EndStatus, stored: tuple[str, bool] | None) -> Incident:
    report = f"{end.decided_by.name} of group {end.producer_group!r} reported {end.decision.name}"
    if status is EndStatus.CONTRADICTED:
        detail = f"{report}, but the other decision stood already and still stands"
        return Incident(IncidentKind.CONTRADICTED, str(end.transaction_id), detail)
    if stored is None or not stored[1]:
        reason = "there is no such half message"
    else:
        reason = f"the half message belongs to group {stored[0]!r}"
    return Incident(IncidentKind.REFUSED, str(end.transaction_id), f"{report}, refused: {reason}")
