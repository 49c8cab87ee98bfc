"""Conditions of undecided transactions: no producer answers for them, or none knows the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import EVIDENCE, Condition, Fact, Judged, Severity, condition
from outbox.broker.operations.summary import Summary
from outbox.broker.operations.thresholds import Thresholds

# The first few of a producer group whose check is due. At most two hundred rows are read. Behind a backlog of checks
# that were decided meanwhile, the condition names the command that lists them instead of examples.
_UNANSWERED: Final = Statement("""
SELECT transaction_id::text
FROM (SELECT transaction_id FROM {schema}.pending_check WHERE producer_group = %(group)s AND parked_at IS NULL
      ORDER BY due_at LIMIT 200) AS due
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = due.transaction_id)
LIMIT 3
""")

_PARKED: Final = Statement("""
SELECT transaction_id::text, producer_group,
       extract(epoch FROM clock_timestamp() - parked_at)::double precision, park_reason, checks,
       last_answer
FROM (SELECT * FROM {schema}.pending_check WHERE parked_at IS NOT NULL ORDER BY parked_at LIMIT 200) AS pending
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
ORDER BY parked_at LIMIT %(limit)s
""")


def rules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return all conditions of this module."""
    unanswered: list[Judged] = []
    for group in summary.producers:
        due_seconds = summary.seconds_since(group.due_since)
        severity = limits.unanswered_seconds.judge(due_seconds)
        if severity:
            examples = [row[0] for row in run.rows(_UNANSWERED, {"group": group.group})]
            fact: Fact = {
                "producer_group": group.group,
                "undecided": group.undecided,
                "due_seconds": due_seconds,
                "transactions": ", ".join(examples) or f"`outbox_transaction list --group {group.group}` lists them",
            }
            unanswered.append((severity, fact))
    yield from condition("unanswered", unanswered)
    yield from _parked(run, limits, summary)


def _parked(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    rows = run.rows(_PARKED, {"limit": EVIDENCE})
    count = max(len(rows), sum(group.parked for group in summary.producers))
    severity = limits.parked_messages.judge(count)
    if severity is None or severity is Severity.OK or not count:
        return
    facts: list[Fact] = [
        {
            "transaction": transaction,
            "producer_group": group,
            "parked_seconds": age,
            "reason": reason,
            "checks": checks,
            "answer": answer,
        }
        for transaction, group, age, reason, checks, answer in rows
    ]
    # The oldest two hundred may have been decided meanwhile.
    yield Condition("parked", severity, facts or [{"list": "`outbox_transaction list --parked` lists them"}], count)
