"""The path of one transaction through the broker: half message, decision, queue entries, and each group's state."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset
from outbox.filters.filter import parse_filter


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
    """It left the queue without a failed attempt (a claim, newer code), and is delivered again by a later entry."""
    DEAD = "dead"
    """The handling of the message failed, and the message became a dead letter. A later entry may have replayed it."""
    RECALLED = "recalled"
    """The retry of the message was recalled, so the group does not get the message again."""
    TIMED_OUT = "timed out"
    """The time limit of the message was over before an attempt, so the group did not handle the entry."""
    HANDLED = "handled"
    """A handler has finished the entry."""
    PASSED = "handled or skipped"
    """A handler has finished the entry, or a reset or the inbox has let the group skip it: the broker does not know."""


class Whereabouts(enum.StrEnum):
    """The state of a message for one consumer group: whether and how the group can still receive it."""

    WAITING = "waiting"
    """The message is undecided, in no queue yet, or in a queue that the group has not consumed; or it is retried."""
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

_WHEREABOUTS: Final = Statement(f"""
WITH asked AS MATERIALIZED (
    SELECT log.message_id, log.log_id, log.half AND op.decision IS NULL AS undecided,
           op.decision IS NOT DISTINCT FROM 'R' AS rolled_back, log.stored_at, log.deliver_at
    FROM {{schema}}.commit_log log LEFT JOIN {{schema}}.op_log op USING (transaction_id)
    WHERE log.message_id = ANY (%(ids)s::uuid[])
), consumer AS MATERIALIZED (
    SELECT group_id FROM {{schema}}.consumer_group WHERE name = %(group)s
), entry AS MATERIALIZED (
    SELECT entry.log_id, bool_or(entry.queue_offset >= coalesce(newest.next_offset, 0)) AS ahead
    FROM {{schema}}.consume_queue entry
    JOIN {{schema}}.queue USING (queue_id)
    JOIN {{schema}}.topic ON topic.topic_id = queue.topic_id
    CROSS JOIN consumer
    LEFT JOIN LATERAL {newest_offset("consumer.group_id", "queue.queue_id")} AS newest ON true
    WHERE entry.log_id = ANY (SELECT log_id FROM asked)
      AND (topic.retry_of IS NULL OR topic.retry_of = consumer.group_id)
    GROUP BY entry.log_id
)
SELECT asked.message_id, CASE
    WHEN asked.rolled_back THEN 'gone'
    WHEN asked.undecided OR entry.ahead
         OR EXISTS (SELECT FROM {{schema}}.scheduled
                    LEFT JOIN {{schema}}.queue USING (queue_id) LEFT JOIN {{schema}}.topic USING (topic_id)
                    WHERE scheduled.log_id = asked.log_id
                      AND (scheduled.queue_id IS NULL OR retry_of = (SELECT group_id FROM consumer)))
         OR EXISTS (SELECT FROM {{schema}}.held WHERE held.log_id = asked.log_id) THEN 'waiting'
    WHEN dead.discarded_at IS NOT NULL THEN 'discarded'
    WHEN dead.log_id IS NOT NULL AND dead.replayed_at IS NULL THEN 'dead'
    WHEN entry.log_id IS NOT NULL THEN 'passed'
    WHEN greatest(asked.stored_at, asked.deliver_at) > now() - make_interval(secs => %(unsequenced)s) THEN 'waiting'
    ELSE 'gone' END
FROM asked
LEFT JOIN entry USING (log_id)
LEFT JOIN {{schema}}.dead_letter dead ON dead.log_id = asked.log_id AND dead.group_id = (SELECT group_id FROM consumer)
""")


def whereabouts(run: Executor, group: str, message_ids: Sequence[UUID]) -> dict[UUID, Whereabouts]:
    """Return for each of these messages whether the group can still receive it."""
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
       log.producer_group, log.born_at::text, log.stored_at::text, log.deliver_at::text,
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
#
# A group can finish messages ahead of its stored offset, so its dead letters and retries come before the offset. A
# failed attempt raises the attempt number of the next entry, and a replayed dead letter begins with 0 again. If the
# number stays, and the message has not become a dead letter since, it left its queue without an attempt. A discarded
# dead letter has the state 'dead', too.
_ENTRIES: Final = Statement(f"""
WITH seen AS (
    SELECT entry.log_id, topic.name || coalesce('/' || retried.name, '') AS topic, queue.queue_id,
           queue.number AS queue, entry.queue_offset AS offset, entry.attempt, entry.queued_at, consumer_group.group_id,
           consumer_group.name AS group, topic.retry_of, queue.floor, coalesce(newest.next_offset, 0) AS next_offset,
           coalesce(newest.start_offset, 0) AS start_offset, newest.skipped + abs(newest.moved) > 0 AS has_passed_over,
           lead(entry.attempt) OVER later AS next_attempt, subscription.filter
    FROM {{schema}}.consume_queue entry
    JOIN {{schema}}.queue USING (queue_id)
    JOIN {{schema}}.topic ON topic.topic_id = queue.topic_id
    LEFT JOIN {{schema}}.topic retried ON topic.retry_of IS NOT NULL AND retried.topic_id = queue.number
    LEFT JOIN {{schema}}.subscription ON subscription.topic_id = topic.topic_id
    LEFT JOIN {{schema}}.consumer_group ON consumer_group.group_id = coalesce(topic.retry_of, subscription.group_id)
    LEFT JOIN LATERAL {newest_offset("consumer_group.group_id", "queue.queue_id")} AS newest ON true
    WHERE entry.log_id = ANY (%(log_ids)s)
    WINDOW later AS (PARTITION BY entry.log_id, consumer_group.group_id
                     ORDER BY topic.retry_of NULLS FIRST, entry.queued_at, entry.attempt, queue.queue_id,
                              entry.queue_offset)
)
SELECT seen.log_id, topic, seen.queue_id, queue, seen.offset, seen.attempt, queued_at::text, seen.group, CASE
           WHEN seen.group IS NULL THEN 'no group'
           WHEN EXISTS (SELECT FROM {{schema}}.timed_out late
                        WHERE late.log_id = seen.log_id AND late.group_id = seen.group_id
                          AND late.queue_id = seen.queue_id AND late.queue_offset = seen.offset) THEN 'timed out'
           WHEN next_attempt IS NULL AND letter.log_id IS NOT NULL
                AND (replayed_at IS NULL OR discarded_at IS NOT NULL) THEN 'dead'
           WHEN next_attempt IS NULL AND retry.claimed THEN 'claimed'
           WHEN next_attempt IS NULL AND retry.attempt = seen.attempt AND (dead_at >= queued_at) IS NOT TRUE
               THEN 'left its queue'
           WHEN next_attempt IS NULL AND retry.attempt IS NOT NULL THEN 'sent back'
           WHEN next_attempt IS NULL AND EXISTS (SELECT FROM {{schema}}.recalled_retry taken
                                                 WHERE taken.log_id = seen.log_id AND taken.group_id = seen.group_id)
               THEN 'recalled'
           WHEN seen.offset >= next_offset THEN CASE WHEN seen.offset < floor THEN 'expired' ELSE 'waiting' END
           WHEN seen.offset < start_offset THEN 'before its start'
           WHEN next_attempt = seen.attempt AND (dead_at >= queued_at) IS NOT TRUE THEN 'left its queue'
           WHEN next_attempt IS NOT NULL THEN CASE WHEN next_attempt = 0 THEN 'dead' ELSE 'sent back' END
           WHEN has_passed_over THEN 'handled or skipped'
           ELSE 'handled' END AS state,
       seen.filter, log.tag,
       CASE WHEN jsonb_typeof(log.headers) = 'object' THEN log.headers ELSE '{{{{}}}}' END AS headers
FROM seen
JOIN {{schema}}.commit_log log USING (log_id)
LEFT JOIN {{schema}}.dead_letter letter ON letter.log_id = seen.log_id AND letter.group_id = seen.group_id
LEFT JOIN LATERAL (SELECT bool_or(claimed) AS claimed, (array_agg(scheduled.attempt ORDER BY due_at DESC))[1] AS attempt
                   FROM {{schema}}.scheduled
                   JOIN {{schema}}.queue USING (queue_id) JOIN {{schema}}.topic USING (topic_id)
                   WHERE scheduled.log_id = seen.log_id AND topic.retry_of = seen.group_id) AS retry ON true
ORDER BY seen.log_id, retry_of NULLS FIRST, seen.queued_at, seen.attempt, seen.queue_id, seen.offset, seen.group
""")

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
class Trace:
    """Everything that the broker knows about one transaction, as rows of the statements above. Times are texts.

    `decision`: C (commit) or R (rollback), by P (producer), K (check-back) or O (operator); None if it is undecided.
    `pending`: its check-back, while it is undecided. A retry that is `claimed` is due only if its process dies.
    """

    messages: list[Row]
    decision: Row | None
    pending: Row | None
    answers: list[Row]
    entries: list[Row]
    failures: list[Row]
    retries: list[Row]
    dead_letters: list[Row]
    timed_out: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Return the rows as values that json.dumps accepts."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: [vars(row) for row in value] if isinstance(value, list) else value and vars(value)
            for name, value in found.items()
        }


def trace(run: Executor, message_or_transaction_id: UUID) -> Trace | None:
    """Return the path of a message's transaction; None if the broker does not have the message."""
    messages = run.objects(Row, _MESSAGES, {"id": message_or_transaction_id})
    if not messages:
        return None
    transaction, rows = {"id": messages[0].transaction_id}, {"log_ids": [message.log_id for message in messages]}
    decision = next(iter(run.objects(Row, _DECISION, transaction)), None)
    return Trace(
        messages=messages,
        decision=decision,
        pending=None if decision else next(iter(run.objects(Row, _PENDING, transaction)), None),
        answers=run.objects(Row, _CHECKS, transaction),
        entries=_entries(run, rows["log_ids"]),
        failures=run.objects(Row, _FAILURES, rows),
        retries=run.objects(Row, _RETRIES, rows),
        dead_letters=run.objects(Row, _DEAD, rows),
        timed_out=run.objects(Row, _TIMED_OUT, rows),
    )


def _entries(run: Executor, log_ids: Sequence[int]) -> list[Row]:
    """Return the queue entries of these messages, each with the state (`EntryState`) of one group."""
    found = run.objects(Row, _ENTRIES, {"log_ids": list(log_ids)})
    for entry in found:
        given, tag, headers = vars(entry).pop("filter"), vars(entry).pop("tag"), vars(entry).pop("headers")
        entry.state = EntryState(entry.state)
        # The filter is the present one. Retries are not filtered again.
        if given and entry.state in (EntryState.HANDLED, EntryState.PASSED):
            entry.state = entry.state if parse_filter(given).evaluate(tag, headers) else EntryState.FILTERED
    return found
