"""Open transactions in the broker: stored halves without a decision, from any sender.

There are no others. The messages of a `message_transaction()` without a local transaction exist only in its process. An
open transaction blocks only its keys on FIFO topics.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.fastpath.arrays import xids
from outbox.broker.operations.trace import TracedAnswer, TracedMessage, trace
from outbox.transaction import STILL_RUNNING


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A half transaction without a decision.

    `state`: new (no check has looked for it yet), waiting (its group is asked at `due_at`) or parked. `is_immune`: its
    immunity has not ended. `transactional_id` and `epoch` belong to a fenced producer, else None. `fenced`: a newer
    instance has replaced the producer. `key` is that of the first message, empty without one.
    """

    transaction_id: UUID
    producer_group: str
    transactional_id: str | None
    epoch: int | None
    fenced: bool
    messages: int
    topics: list[str]
    key: str
    stored_at: datetime
    state: str
    checks: int
    due_at: datetime | None
    last_answer: str | None
    is_immune: bool = False

    @property
    def may_run(self) -> str:
        """Return why its local transaction may still run; empty without a reason. A parked one is past all limits."""
        if self.state == "parked":
            return ""
        if self.state == "new":
            return "no check has looked for it yet"
        if self.is_immune:
            return "it is younger than its immunity"
        if (self.last_answer or "").startswith(STILL_RUNNING):
            return "it still ran when check-back asked last"
        return ""


@dataclass(frozen=True, slots=True)
class Description:
    """An open transaction with its messages and the answers to its checks."""

    transaction: OpenTransaction
    messages: list[TracedMessage]
    answers: list[TracedAnswer]


_LAST_SCAN: Final = Statement("SELECT snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1")

# Find rows that the half scan has not read yet as the scan would: by the snapshot of the last scan.
_NEW: Final = """
    SELECT transaction_id, log_id, NULL::timestamptz AS parked_at, 0 AS checks, NULL::timestamptz AS due_at,
           NULL::text AS last_answer, true AS is_immune, true AS new
    FROM {schema}.commit_log new_half
    WHERE half AND message_id = transaction_id
      AND NOT EXISTS (SELECT FROM {schema}.pending_check known WHERE known.transaction_id = new_half.transaction_id)
      AND """

_OPEN: Final = Statement(f"""
WITH undecided AS (
    SELECT transaction_id, log_id, parked_at, checks, due_at, last_answer,
           clock_timestamp() < immune_until AS is_immune, false AS new
    FROM {{schema}}.pending_check
    UNION ALL {_NEW} xid >= %(xmax)s::xid8
    UNION ALL {_NEW} xid = ANY(%(xip)s::xid8[])
)
SELECT undecided.transaction_id, first.producer_group, noted.transactional_id, noted.epoch,
       coalesce(noted.epoch < newest.epoch, false) AS fenced, part.messages, part.topics,
       first.key, first.stored_at,
       CASE WHEN undecided.parked_at IS NOT NULL THEN 'parked' WHEN undecided.new THEN 'new'
            ELSE 'waiting' END AS state,
       undecided.checks, undecided.due_at, undecided.last_answer, undecided.is_immune
FROM undecided JOIN {{schema}}.commit_log first USING (log_id)
LEFT JOIN {{schema}}.fenced_half noted ON noted.transaction_id = undecided.transaction_id
LEFT JOIN {{schema}}.producer_epoch newest
    ON newest.producer_group = noted.producer_group AND newest.transactional_id = noted.transactional_id
CROSS JOIN LATERAL (
    SELECT count(*) AS messages, array_agg(DISTINCT topic.name ORDER BY topic.name) AS topics
    FROM {{schema}}.commit_log log JOIN {{schema}}.topic USING (topic_id)
    WHERE log.half AND log.xid = first.xid AND log.transaction_id = undecided.transaction_id
) AS part
WHERE undecided.transaction_id > %(after)s
  AND (%(id)s::uuid IS NULL OR undecided.transaction_id = %(id)s)
  AND (NOT %(parked)s OR undecided.parked_at IS NOT NULL)
  AND (%(group)s::text IS NULL OR first.producer_group = %(group)s)
  AND (%(transactional_id)s::text IS NULL OR noted.transactional_id = %(transactional_id)s)
  AND NOT EXISTS (SELECT FROM {{schema}}.op_log WHERE op_log.transaction_id = undecided.transaction_id)
ORDER BY undecided.transaction_id LIMIT %(limit)s
""")


def list_open(
    run: Executor,
    group: str | None = None,
    transactional_id: str | None = None,
    *,
    parked: bool = False,
    after: UUID | None = None,
    limit: int = 100,
) -> list[OpenTransaction]:
    """Return a page of open transactions, the oldest first: of a producer group or transactional id, or of all.

    `parked`: only those past the limits of checks. The next page begins after the last transaction id of this one.
    Changes nothing.
    """
    return _find(run, group=group, transactional_id=transactional_id, parked=parked, after=after, limit=limit)


def open_transaction(run: Executor, transaction_id: UUID) -> OpenTransaction | None:
    """Return one open transaction; None if it is decided or unknown."""
    found = _find(run, transaction_id=transaction_id, limit=1)
    return found[0] if found else None


def describe(run: Executor, transaction_id: UUID) -> Description | None:
    """Return one open transaction with its messages and answers; None if it is decided or unknown."""
    found = open_transaction(run, transaction_id)
    traced = trace(run, transaction_id) if found else None
    if found is None or traced is None:
        return None
    return Description(transaction=found, messages=traced.messages, answers=traced.answers)


def _find(
    run: Executor,
    *,
    transaction_id: UUID | None = None,
    group: str | None = None,
    transactional_id: str | None = None,
    parked: bool = False,
    after: UUID | None = None,
    limit: int,
) -> list[OpenTransaction]:
    last = Snapshot.parse(run.one(_LAST_SCAN)[0])
    values = {
        "xmax": str(last.xmax),
        "xip": xids(last.in_progress),
        "id": transaction_id,
        "group": group,
        "transactional_id": transactional_id,
        "parked": parked,
        "after": after or UUID(int=0),
        "limit": limit,
    }
    # Not prepared: without the snapshot's values, the plan would read the whole log.
    return run.objects(OpenTransaction, _OPEN, values, prepare=False)
