"""End messages: record decisions in the op log. A transaction's first decision is final."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from outbox.broker.database.arrays import texts, uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.sender import first_row
from outbox.broker.database.statement import TEXT, UUID_, Request, Statement
from outbox.errors import UsageError
from outbox.transaction import DecidedBy, Decision, EndStatus, EndTransaction

logger = logging.getLogger(__name__)

# The SQL function finds the messages of the transaction in the log after the outcome of the local transaction is known.
# So the caller can neither add a message to the decision nor omit a message. The function also records contradictions
# and refusals as incidents.
_END_ONE = Statement('SELECT {schema}.record_end($1, $2::"char", $3)', (UUID_, TEXT, TEXT), (TEXT,))

# Sorted by transaction id, because inserts that may conflict must lock in one order.
_END_ALL = Statement("""
WITH ended AS MATERIALIZED (
    SELECT place,
           {schema}.record_end(transaction_id, decision::"char", producer_group, decided_by::"char", false) AS status
    FROM (
        SELECT * FROM unnest(%(ids)s::uuid[], %(decisions)s::text[], %(groups)s::text[], %(deciders)s::text[])
            WITH ORDINALITY AS given (transaction_id, decision, producer_group, decided_by, place)
        ORDER BY transaction_id, place OFFSET 0
    ) AS given
)
SELECT status FROM ended ORDER BY place
""")

_REASONS: Final = {
    EndStatus.CONTRADICTED: "but the other decision stood already and still stands",
    EndStatus.REFUSED: "refused: there is no such half message, it belongs to another group, or this role may not "
    "decide for the group; the stored incident says which",
}

# OFFSET 0 makes PostgreSQL look up each id by index, and keeps the planner from reading the whole table for some
# thousand ids.
_STANDING = Statement("""
SELECT transaction_id, decision::text
FROM unnest(%(ids)s::uuid[]) AS given (id)
CROSS JOIN LATERAL (SELECT transaction_id, decision FROM {schema}.op_log WHERE transaction_id = given.id OFFSET 0) AS op
""")


def record_ends(run: Executor, ends: Sequence[EndTransaction]) -> list[EndStatus]:
    """Record decisions, and return one status per end message, in order.

    An end message that contradicts the decision or is refused is recorded as an incident. The commit waits for the
    disk.
    """
    for end in ends:
        if end.decision is Decision.UNKNOWN:
            raise UsageError(f"transaction {end.transaction_id}: UNKNOWN is no outcome; report COMMIT or ROLLBACK.")
    if not ends:
        return []
    parameters = {
        "ids": uuids([end.transaction_id for end in ends]),
        "decisions": texts([end.decision for end in ends]),
        "groups": texts([end.producer_group for end in ends]),
        "deciders": texts([end.decided_by for end in ends]),
    }
    statuses = [EndStatus(status) for (status,) in run.rows(_END_ALL, parameters, prepare=True)]
    for end, status in zip(ends, statuses, strict=True):
        if status in (EndStatus.CONTRADICTED, EndStatus.REFUSED):
            said = f"{end.decided_by.name} of group {end.producer_group!r} reported {end.decision.name}"
            logger.warning("incident %s: %s: %s, %s", status, end.transaction_id, said, _REASONS[status])
    return statuses


def record_end(run: Executor, end: EndTransaction) -> EndStatus:
    """Do the same as `record_ends` for one end message. For a producer's end, EXECUTE on a function is enough.

    If there is a ledger, the commit of a producer's end message does not wait for the disk.
    """
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
