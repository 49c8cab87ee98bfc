"""The path of one transaction through the broker: half message, decision, queue entries, and each group's state."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor, time_of
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset
from outbox.filters.filter import parse_filter

# The log id of a message, and a group.
_Place = tuple[int, str | None]


class EntryState(enum.StrEnum):
    """A group's state on a queue entry."""

    NO_GROUP = "no group"
    """No group has subscribed to the topic."""
    WAITING = "waiting"
    """The group has not finished the entry."""
    EXPIRED = "expired"
    """Retention removed the entry before the group had consumed it."""
    BEFORE_START = "before its start"
    """The start offset of the group is after the entry."""
    FILTERED = "filtered"
    """The group's present filter excludes the message."""
    CLAIMED = "claimed"
    """A handler with effects="outside" runs, and the message has left its queue. The entry is not finished."""
    SENT_BACK = "sent back"
    """The handling of the message failed, and the message was put into the group's retry queue."""
    LEFT = "left its queue"
    """The message left the queue without a failed attempt, and is delivered again by a later entry.

    A handler with effects="outside" had claimed it, or it waits for newer code.
    """
    DEAD = "dead"
    """The handling of the message failed, and the message became a dead letter. A later entry may have replayed it."""
    RECALLED = "recalled"
    """The retry of the message was recalled, so the group does not get the message again."""
    TIMED_OUT = "timed out"
    """The time limit of the message was over before an attempt, so the group did not handle the entry."""
    HANDLED = "handled"
    """A handler has finished the entry."""
    PASSED = "handled or skipped"
    """A handler has finished the entry, or the group has skipped it.

    The group has skipped some entries of this queue: a message was already in the inbox, or a reset moved the group's
    offset to a later entry. The broker does not store which entries were skipped.
    """


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """A queue entry as one group sees it.

    `floor` belongs to the queue; `next_offset`, `start_offset` and `passed_over` belong to the group.
    """

    log_id: int
    topic: str
    queue_id: int
    queue: int
    offset: int
    attempt: int
    queued_at: str
    group: str | None
    is_retry: bool
    floor: int
    next_offset: int
    start_offset: int
    passed_over: int
    filter: str
    tag: str
    headers: str | None

    @property
    def place(self) -> _Place:
        """The log id of the message, and the group."""
        return self.log_id, self.group

    @property
    def is_filtered(self) -> bool:
        """Whether the group's filter excludes the message. Retries are not filtered again."""
        headers = json.loads(self.headers) if self.headers else {}
        return not self.is_retry and not parse_filter(self.filter).evaluate(self.tag, headers)


def state_of(
    entry: EntryFacts,
    later: Sequence[EntryFacts],
    retrying: Mapping[_Place, int],
    dead: Collection[_Place],
    timed_out: Collection[tuple[str | None, int, int]] = (),
    claimed: Collection[_Place] = (),
    died: Mapping[_Place, datetime] | None = None,
    recalled: Collection[_Place] = (),
) -> EntryState:
    """Return the state of an entry. `later` has newer entries of the same message for the group.

    A failed attempt raises the attempt number of the next entry, and a replayed dead letter begins with 0 again. If the
    number stays, the message left its queue without an attempt. `retrying` has the attempt numbers of messages that
    wait for another attempt, by (log id, group). `dead` has (log id, group) of dead letters that were not replayed.
    `timed_out` has (group, queue id, offset) of entries whose message timed out. `claimed` has (log id, group) of
    messages that have left their queue while their handler runs. `died` has the time of the last death of each dead
    letter, replayed or not. `recalled` has (log id, group) of recalled retries.
    """
    if entry.group is None:
        return EntryState.NO_GROUP
    # A group can finish messages ahead of its stored offset. So the dead letters and retries of the message are checked
    # before the offset of the group.
    if (entry.group, entry.queue_id, entry.offset) in timed_out:
        return EntryState.TIMED_OUT
    if not later and entry.place in dead:
        return EntryState.DEAD
    if not later and entry.place in claimed:
        return EntryState.CLAIMED
    has_died = _died_since(entry, (died or {}).get(entry.place))
    if not later and (attempt := retrying.get(entry.place)) is not None:
        return EntryState.LEFT if attempt == entry.attempt and not has_died else EntryState.SENT_BACK
    if not later and entry.place in recalled:
        return EntryState.RECALLED
    if entry.offset >= entry.next_offset:
        return EntryState.EXPIRED if entry.offset < entry.floor else EntryState.WAITING
    if entry.offset < entry.start_offset:
        return EntryState.BEFORE_START
    if later and later[0].attempt == entry.attempt and not has_died:
        return EntryState.LEFT
    if later:
        return EntryState.DEAD if later[0].attempt == 0 else EntryState.SENT_BACK
    if entry.is_filtered:
        return EntryState.FILTERED
    return EntryState.PASSED if entry.passed_over else EntryState.HANDLED


def _died_since(entry: EntryFacts, died_at: datetime | None) -> bool:
    """Whether the message became a dead letter after the entry was queued."""
    if died_at is None:
        return False
    return datetime.fromisoformat(entry.queued_at) <= died_at


# ---------------------------------------------------------------------------------------------------------------------
# Find out which of some messages a consumer group can still receive.


class Whereabouts(enum.StrEnum):
    """The state of a message for one consumer group: whether and how the group can still receive it."""

    WAITING = "waiting"
    """The message is undecided, not queued yet, scheduled or held, or it waits for a retry.

    A message in a queue also has this state if the group has not consumed it yet.
    """
    DEAD = "dead"
    """The message is a dead letter that no operator has settled."""
    DISCARDED = "discarded"
    """An operator has discarded the dead letter."""
    PASSED = "passed"
    """The group's offset has passed the message: it was handled, skipped or filtered."""
    GONE = "gone"
    """The broker does not have the message: it expired, was lost by a restore, or its transaction was rolled back."""


# A decided message has no entry in two cases: the sequencer has not read the message yet, or retention has removed the
# entry and will remove the message later.
_UNSEQUENCED_SECONDS: Final = 3600

_WHEREABOUTS: Final = Statement(
    """
WITH asked AS MATERIALIZED (
    SELECT log.message_id, log.log_id, log.half AND op.decision IS NULL AS undecided,
           op.decision IS NOT DISTINCT FROM 'R' AS rolled_back, log.stored_at, log.deliver_at
    FROM {schema}.commit_log log LEFT JOIN {schema}.op_log op USING (transaction_id)
    WHERE log.message_id = ANY (%(ids)s::uuid[])
), consumer AS MATERIALIZED (
    SELECT group_id FROM {schema}.consumer_group WHERE name = %(group)s
), entry AS MATERIALIZED (
    SELECT entry.log_id, bool_or(entry.queue_offset >= coalesce(newest.next_offset, 0)) AS ahead
    FROM {schema}.consume_queue entry
    JOIN {schema}.queue USING (queue_id)
    JOIN {schema}.topic ON topic.topic_id = queue.topic_id
    CROSS JOIN consumer
    LEFT JOIN LATERAL """
    + newest_offset("consumer.group_id", "queue.queue_id")
    + """ AS newest ON true
    WHERE entry.log_id = ANY (SELECT log_id FROM asked)
      AND (topic.retry_of IS NULL OR topic.retry_of = consumer.group_id)
    GROUP BY entry.log_id
)
SELECT asked.message_id, CASE
    WHEN asked.rolled_back THEN 'gone'
    WHEN asked.undecided OR entry.ahead
         OR EXISTS (SELECT FROM {schema}.scheduled WHERE scheduled.log_id = asked.log_id)
         OR EXISTS (SELECT FROM {schema}.held WHERE held.log_id = asked.log_id) THEN 'waiting'
    WHEN dead.discarded_at IS NOT NULL THEN 'discarded'
    WHEN dead.log_id IS NOT NULL AND dead.replayed_at IS NULL THEN 'dead'
    WHEN entry.log_id IS NOT NULL THEN 'passed'
    WHEN greatest(asked.stored_at, asked.deliver_at) > now() - make_interval(secs => %(unsequenced)s) THEN 'waiting'
    ELSE 'gone' END
FROM asked
LEFT JOIN entry USING (log_id)
LEFT JOIN {schema}.dead_letter dead ON dead.log_id = asked.log_id AND dead.group_id = (SELECT group_id FROM consumer)
"""
)


def whereabouts(run: Executor, group: str, message_ids: Sequence[UUID]) -> dict[UUID, Whereabouts]:
    """Return for each of these messages whether the group can still receive it. One statement reads all messages."""
    parameters = {"ids": list(message_ids), "group": group, "unsequenced": _UNSEQUENCED_SECONDS}
    found = {message_id: Whereabouts(where) for message_id, where in run.rows(_WHEREABOUTS, parameters)}
    return {message_id: found.get(message_id, Whereabouts.GONE) for message_id in message_ids}


# Find a transaction by message id or transaction id. A transaction has the id of its first message.
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

# An entry in a topic's queue concerns every group of the topic. An entry in a retry queue concerns only its group.
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
ORDER BY entry.log_id, topic.retry_of NULLS FIRST, entry.queued_at, entry.attempt, queue.queue_id,
         entry.queue_offset, consumer_group.name
"""
)

_FAILURES: Final = Statement("""
SELECT log_id, consumer_group.name AS group, attempt, failed_at::text, error
FROM {schema}.failure JOIN {schema}.consumer_group USING (group_id)
WHERE log_id = ANY (%(log_ids)s) ORDER BY failed_at
""")

_RETRIES: Final = Statement("""
SELECT scheduled.log_id, consumer_group.name AS group, scheduled.attempt, scheduled.due_at::text, scheduled.claimed
FROM {schema}.scheduled JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
JOIN {schema}.consumer_group ON consumer_group.group_id = topic.retry_of
WHERE log_id = ANY (%(log_ids)s) ORDER BY due_at
""")

_RECALLED: Final = Statement("""
SELECT log_id, consumer_group.name FROM {schema}.recalled_retry JOIN {schema}.consumer_group USING (group_id)
WHERE log_id = ANY (%(log_ids)s)
""")

_DEAD: Final = Statement("""
SELECT log_id, consumer_group.name AS group, attempts, dead_at::text,
       CASE WHEN discarded_at IS NULL THEN replayed_at END::text AS replayed_at,
       CASE WHEN replayed_at IS NOT NULL THEN discarded_at END::text AS discarded_at, error
FROM {schema}.dead_letter JOIN {schema}.consumer_group USING (group_id)
WHERE log_id = ANY (%(log_ids)s) ORDER BY dead_at
""")

_TIMED_OUT: Final = Statement("""
SELECT log_id, consumer_group.name AS group, queue_id, queue_offset AS offset, timed_out_at::text
FROM {schema}.timed_out JOIN {schema}.consumer_group USING (group_id)
WHERE log_id = ANY (%(log_ids)s) ORDER BY timed_out_at
""")


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """A stored message. The times of a traced message are text in ISO format; a time that does not apply is None."""

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
    """The final decision: C (commit) or R (rollback), reported by P (producer), K (check-back) or O (operator)."""

    decision: str
    decided_by: str
    decided_at: str


@dataclass(frozen=True, slots=True)
class TracedCheck:
    """An undecided transaction in check-back. `due_at`: the time at which the broker asks the producer group next.

    See ParkReason.
    """

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
    """A queue entry and one group's state on this entry."""

    log_id: int
    topic: str
    queue_id: int
    queue: int
    offset: int
    attempt: int
    queued_at: str
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
    """A retry that is not due yet. `claimed`: the handler runs now, and the retry is due if its process dies."""

    log_id: int
    group: str
    attempt: int
    due_at: str
    claimed: bool


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
class TracedTimeout:
    """An entry that a group did not handle, because the time limit of the message was over before an attempt."""

    log_id: int
    group: str
    queue_id: int
    offset: int
    timed_out_at: str


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
    timed_out: list[TracedTimeout]

    def as_json(self) -> dict[str, Any]:
        """Return the fields as values that json.dumps accepts."""
        return dataclasses.asdict(self)


def trace(run: Executor, message_or_transaction_id: UUID) -> Trace | None:
    """Return the path of a message's transaction; None if the broker does not have the message."""
    messages = run.objects(TracedMessage, _MESSAGES, {"id": message_or_transaction_id})
    if not messages:
        return None
    transaction = {"id": messages[0].transaction_id}
    rows = {"log_ids": [message.log_id for message in messages]}
    decisions = run.objects(TracedDecision, _DECISION, transaction)
    pending = run.objects(TracedCheck, _PENDING, transaction)
    retries = run.objects(TracedRetry, _RETRIES, rows)
    dead_letters = run.objects(TracedDeath, _DEAD, rows)
    timed_out = run.objects(TracedTimeout, _TIMED_OUT, rows)
    return Trace(
        messages=messages,
        decision=decisions[0] if decisions else None,
        pending=pending[0] if pending and not decisions else None,
        answers=run.objects(TracedAnswer, _CHECKS, transaction),
        entries=_entries(run, rows, retries, dead_letters, timed_out),
        failures=run.objects(TracedFailure, _FAILURES, rows),
        retries=retries,
        dead_letters=dead_letters,
        timed_out=timed_out,
    )


def traced_entries(run: Executor, log_ids: Sequence[int]) -> list[TracedEntry]:
    """Return the queue entries of these messages, with the state of each group."""
    rows = {"log_ids": list(log_ids)}
    retries = run.objects(TracedRetry, _RETRIES, rows)
    dead_letters = run.objects(TracedDeath, _DEAD, rows)
    return _entries(run, rows, retries, dead_letters, run.objects(TracedTimeout, _TIMED_OUT, rows))


def _entries(
    run: Executor,
    rows: Mapping[str, Any],
    retries: Sequence[TracedRetry],
    letters: Sequence[TracedDeath],
    timeouts: Sequence[TracedTimeout],
) -> list[TracedEntry]:
    """Return the queue entries of the messages that the parameters `rows` of the statements name."""
    recalled = {(log_id, group) for log_id, group in run.rows(_RECALLED, rows)}
    facts = run.objects(EntryFacts, _ENTRIES, rows)
    retrying: dict[_Place, int] = {(retry.log_id, retry.group): retry.attempt for retry in retries}
    claimed = {(retry.log_id, retry.group) for retry in retries if retry.claimed}
    # A discarded dead letter is in `dead`, too. So its last entry has the state DEAD, and the field of the dead letter
    # shows that an operator discarded it.
    dead = {(letter.log_id, letter.group) for letter in letters if letter.replayed_at is None}
    died: dict[_Place, datetime] = {(one.log_id, one.group): time_of(one.dead_at) for one in letters}
    timed_out = {(one.group, one.queue_id, one.offset) for one in timeouts}
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
                state=state_of(entry, later, retrying, dead, timed_out, claimed, died, recalled),
            )
        )
    return found
