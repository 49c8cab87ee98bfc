"""The path of one transaction through the broker: half, decision, queue entries, and each group's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset
from outbox.broker.operations.trace_states import EntryFacts, EntryState, state_of

# By message id or transaction id: the first message's id is the transaction's.
_MESSAGES: Final = Statement("""
WITH named AS (
    SELECT transaction_id, xid, half, log_id FROM {schema}.commit_log WHERE message_id = %(id)s
), wanted AS (
    SELECT unnest(log_ids) AS log_id FROM {schema}.op_log WHERE transaction_id = (SELECT transaction_id FROM named)
    UNION
    SELECT log.log_id FROM {schema}.commit_log log JOIN named USING (xid, transaction_id) WHERE log.half
    UNION
    SELECT log_id FROM named
)
SELECT log.log_id, log.message_id::text, log.transaction_id::text, topic.name AS topic, log.key, log.tag, log.half,
       log.producer_group, log.checker, log.born_at::text, log.stored_at::text, log.deliver_at::text,
       scheduled.due_at::text AS scheduled_for, held.held_at::text AS held_since, recalled.recalled_at::text
FROM wanted JOIN {schema}.commit_log log USING (log_id)
JOIN {schema}.topic USING (topic_id)
LEFT JOIN {schema}.scheduled ON scheduled.log_id = log.log_id AND scheduled.queue_id IS NULL
LEFT JOIN {schema}.held ON held.log_id = log.log_id
LEFT JOIN {schema}.recalled ON recalled.log_id = log.log_id
ORDER BY log.log_id
""")

_DECISION: Final = Statement("""
SELECT decision::text, decided_by::text, decided_at::text FROM {schema}.op_log WHERE transaction_id = %(id)s::uuid
""")

_PENDING: Final = Statement("""
SELECT checks, immune_until::text, due_at::text, asked_at::text, parked_at::text, park_reason, last_answer
FROM {schema}.pending_check WHERE transaction_id = %(id)s::uuid
""")

_CHECKS: Final = Statement("""
SELECT checked_at::text, answer, detail FROM {schema}.check_history
WHERE transaction_id = %(id)s::uuid ORDER BY checked_at
""")

# A first delivery concerns every group of the topic, a retry queue only its own.
_ENTRIES: Final = Statement(
    """
SELECT entry.log_id, topic.name || coalesce('/' || retried.name, '') AS topic, queue.queue_id, queue.number AS queue,
       entry.queue_offset AS offset, entry.attempt, entry.queued_at::text, consumer_group.name AS group,
       topic.retry_of IS NOT NULL AS is_retry, queue.floor, coalesce(newest.next_offset, 0) AS next_offset,
       coalesce(newest.start_offset, 0) AS start_offset, coalesce(newest.skipped + abs(newest.moved), 0) AS passed_over,
       coalesce(subscription.filter, '') AS filter, log.tag, log.headers::text
FROM {schema}.consume_queue entry
JOIN {schema}.commit_log log USING (log_id)
JOIN {schema}.queue USING (queue_id)
JOIN {schema}.topic ON topic.topic_id = queue.topic_id
LEFT JOIN {schema}.topic retried ON topic.retry_of IS NOT NULL AND retried.topic_id = queue.number
LEFT JOIN {schema}.subscription ON subscription.topic_id = topic.topic_id
LEFT JOIN {schema}.consumer_group ON consumer_group.group_id = coalesce(topic.retry_of, subscription.group_id)
LEFT JOIN LATERAL """
    + newest_offset("consumer_group.group_id", "queue.queue_id")
    + """ AS newest ON true
WHERE entry.log_id = ANY (%(log_ids)s)
ORDER BY entry.log_id, topic.retry_of NULLS FIRST, entry.queued_at NULLS FIRST, entry.attempt, queue.queue_id,
         entry.queue_offset, consumer_group.name
"""
)

_FAILURES: Final = Statement("""
SELECT log_id, consumer_group.name AS group, attempt, failed_at::text, error
FROM {schema}.failure JOIN {schema}.consumer_group USING (group_id)
WHERE log_id = ANY (%(log_ids)s) ORDER BY failed_at
""")

_RETRIES: Final = Statement("""
SELECT scheduled.log_id, consumer_group.name AS group, scheduled.attempt, scheduled.due_at::text
FROM {schema}.scheduled JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
JOIN {schema}.consumer_group ON consumer_group.group_id = topic.retry_of
WHERE log_id = ANY (%(log_ids)s) ORDER BY due_at
""")

_DEAD: Final = Statement("""
SELECT log_id, consumer_group.name AS group, attempts, dead_at::text,
       CASE WHEN discarded_at IS NULL THEN replayed_at END::text AS replayed_at,
       CASE WHEN replayed_at IS NOT NULL THEN discarded_at END::text AS discarded_at, error
FROM {schema}.dead_letter JOIN {schema}.consumer_group USING (group_id)
WHERE log_id = ANY (%(log_ids)s) ORDER BY dead_at
""")


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """A stored message; times are ISO-like text, None where they do not apply."""

    log_id: int
    message_id: str
    transaction_id: str
    topic: str
    key: str
    tag: str
    half: bool
    producer_group: str | None
    checker: str | None
    born_at: str
    stored_at: str
    deliver_at: str | None
    scheduled_for: str | None
    held_since: str | None
    recalled_at: str | None


@dataclass(frozen=True, slots=True)
class TracedDecision:
    """The standing decision: C or R, reported by P (producer), K (check-back) or O (operator)."""

    decision: str
    decided_by: str
    decided_at: str


@dataclass(frozen=True, slots=True)
class TracedCheck:
    """An undecided transaction in check-back; `due_at`: when its group is asked next. See ParkReason."""

    checks: int
    immune_until: str
    due_at: str
    asked_at: str | None
    parked_at: str | None
    park_reason: str | None
    last_answer: str | None


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """One answer of a checker."""

    checked_at: str
    answer: str
    detail: str


@dataclass(frozen=True, slots=True)
class TracedEntry:
    """A queue entry, its time of queueing (None: stored by an old version), and one group's state on it."""

    log_id: int
    topic: str
    queue_id: int
    queue: int
    offset: int
    attempt: int
    queued_at: str | None
    group: str | None
    state: EntryState


@dataclass(frozen=True, slots=True)
class TracedFailure:
    """A failed attempt."""

    log_id: int
    group: str
    attempt: int
    failed_at: str
    error: str


@dataclass(frozen=True, slots=True)
class TracedRetry:
    """A retry that is not due yet."""

    log_id: int
    group: str
    attempt: int
    due_at: str


@dataclass(frozen=True, slots=True)
class TracedDeath:
    """A dead letter."""

    log_id: int
    group: str
    attempts: int
    dead_at: str
    replayed_at: str | None
    discarded_at: str | None
    error: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that the broker knows about one transaction."""

    messages: list[TracedMessage]
    decision: TracedDecision | None
    pending: TracedCheck | None
    answers: list[TracedAnswer]
    entries: list[TracedEntry]
    failures: list[TracedFailure]
    retries: list[TracedRetry]
    dead_letters: list[TracedDeath]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for json.dumps."""
        return dataclasses.asdict(self)


def trace(run: Executor, message_or_transaction_id: UUID) -> Trace | None:
    """Return the path of a message and the others of its transaction; None if the broker does not have it."""
    messages = run.objects(TracedMessage, _MESSAGES, {"id": message_or_transaction_id})
    if not messages:
        return None
    transaction = {"id": messages[0].transaction_id}
    rows = {"log_ids": [message.log_id for message in messages]}
    decisions = run.objects(TracedDecision, _DECISION, transaction)
    pending = run.objects(TracedCheck, _PENDING, transaction)
    retries = run.objects(TracedRetry, _RETRIES, rows)
    dead_letters = run.objects(TracedDeath, _DEAD, rows)
    return Trace(
        messages=messages,
        decision=decisions[0] if decisions else None,
        pending=pending[0] if pending and not decisions else None,
        answers=run.objects(TracedAnswer, _CHECKS, transaction),
        entries=_entries(run.objects(EntryFacts, _ENTRIES, rows), retries, dead_letters),
        failures=run.objects(TracedFailure, _FAILURES, rows),
        retries=retries,
        dead_letters=dead_letters,
    )


def _entries(
    facts: Sequence[EntryFacts], retries: Sequence[TracedRetry], letters: Sequence[TracedDeath]
) -> list[TracedEntry]:
    retrying = {(retry.log_id, retry.group) for retry in retries}
    # A discarded letter has its own note; its last entry still ended as a dead one.
    dead = {(letter.log_id, letter.group) for letter in letters if letter.replayed_at is None}
    found = []
    for index, entry in enumerate(facts):
        later = [other for other in facts[index + 1 :] if other.place == entry.place]
        found.append(
            TracedEntry(
                log_id=entry.log_id,
                topic=entry.topic,
                queue_id=entry.queue_id,
                queue=entry.queue,
                offset=entry.offset,
                attempt=entry.attempt,
                queued_at=entry.queued_at,
                group=entry.group,
                state=state_of(entry, later, retrying, dead),
            )
        )
    return found
