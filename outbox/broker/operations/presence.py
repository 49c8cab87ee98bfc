"""The broker's knowledge of a project: its groups, its messages, its transactions."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.fastpath import arrays

_IS_USED_BY = Statement("""
SELECT EXISTS (SELECT FROM {schema}.consumer_group WHERE name = ANY (%(groups)s::text[]))
    OR (%(producer_group)s::text <> ''
        AND EXISTS (SELECT FROM {schema}.commit_log WHERE producer_group = %(producer_group)s::text))
""")


def is_used_by(run: Executor, *, producer_group: str, consumer_groups: Sequence[str]) -> bool:
    """Whether the broker knows one of the consumer groups, or still stores messages of the producer group."""
    parameters = {"producer_group": producer_group, "groups": arrays.texts(list(consumer_groups))}
    return bool(run.one(_IS_USED_BY, parameters)[0])


# A transaction has the id of its first message. OFFSET 0 keeps the planner from reading a whole table for the few ids
# of a batch.
_UNKNOWN = Statement("""
SELECT given.id FROM unnest(%(ids)s::uuid[]) AS given (id)
WHERE NOT EXISTS (SELECT FROM {schema}.op_log o WHERE o.transaction_id = given.id OFFSET 0)
  AND NOT EXISTS (SELECT FROM {schema}.commit_log l WHERE l.message_id = given.id OFFSET 0)
""")


def unknown_transactions(run: Executor, ids: Sequence[UUID]) -> set[UUID]:
    """Return those for which the broker has neither a half message nor a decision."""
    return {found for (found,) in run.rows(_UNKNOWN, {"ids": arrays.uuids(ids)})}


# Messages that wait in a queue, for a retry, for their key or for an operator are in the log: retention keeps them.
_DELIVERABLE = Statement("""
SELECT given.place
FROM unnest(%(groups)s::text[], %(generations)s::integer[], %(ids)s::uuid[])
     WITH ORDINALITY AS given (consumer_group, generation, message_id, place)
JOIN {schema}.consumer_group known ON known.name = given.consumer_group AND known.generation <= given.generation
WHERE EXISTS (SELECT FROM {schema}.commit_log log WHERE log.message_id = given.message_id OFFSET 0)
""")


def deliverable(run: Executor, handled: Sequence[tuple[str, int, UUID]]) -> set[int]:
    """Return which of the handled messages the broker could deliver again, by position in `handled`.

    Each entry is a consumer group, its generation at that time, and a message id. Retention removes a message from the
    log once no group waits for it, so a message that is not in the log is not delivered. An operator may move a group
    back to any message in the log. An unknown group gets no messages, and no group returns to an older generation.
    """
    values = {
        "groups": arrays.texts([group for group, _, _ in handled]),
        "generations": arrays.integers([generation for _, generation, _ in handled]),
        "ids": arrays.uuids([message_id for _, _, message_id in handled]),
    }
    return {place - 1 for (place,) in run.rows(_DELIVERABLE, values)}
