"""What pruning and comparisons ask the broker about ledgers and inboxes, which are in databases that it cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

_IS_USED_BY = Statement("""
SELECT EXISTS (SELECT FROM {schema}.consumer_group WHERE name = ANY (%(groups)s::text[]))
    OR (%(producer_group)s::text <> ''
        AND EXISTS (SELECT FROM {schema}.commit_log WHERE producer_group = %(producer_group)s::text))
""")


def is_used_by(run: Executor, *, producer_group: str, consumer_groups: Sequence[str]) -> bool:
    """Return whether the broker knows one of the consumer groups, or still stores messages of the producer group."""
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
    """Return the transactions for which the broker has neither a half message nor a decision."""
    return {found for (found,) in run.rows(_UNKNOWN, {"ids": arrays.uuids(ids)})}


# Retention keeps a message in the log while the message waits in a queue, for a retry, for an earlier message of its
# key, or for an operator.
_DELIVERABLE = Statement("""
SELECT given.place
FROM unnest(%(groups)s::text[], %(generations)s::integer[], %(ids)s::uuid[])
     WITH ORDINALITY AS given (consumer_group, generation, message_id, place)
JOIN {schema}.consumer_group known ON known.name = given.consumer_group AND known.generation <= given.generation
WHERE EXISTS (SELECT FROM {schema}.commit_log log WHERE log.message_id = given.message_id OFFSET 0)
""")


def deliverable(run: Executor, handled: Sequence[tuple[str, int, UUID]]) -> set[int]:
    """Return the indexes (in the list `handled`) of the messages that the broker could deliver again.

    Each element of `handled` has a consumer group, the generation in which the group handled the message, and the
    message id. A message that is not in the log is not delivered, but an operator may move a group back to any one in
    it. An unknown group gets no messages, and no group returns to an older generation, unless it is deleted or the
    broker is restored.
    """
    values = {
        "groups": arrays.texts([group for group, _, _ in handled]),
        "generations": arrays.integers([generation for _, generation, _ in handled]),
        "ids": arrays.uuids([message_id for _, _, message_id in handled]),
    }
    return {place - 1 for (place,) in run.rows(_DELIVERABLE, values)}


# ---------------------------------------------------------------------------------------------------------------------
# How far the services have pruned their ledgers and inboxes.

LEDGER: Final = "ledger"
INBOX: Final = "inbox"


_REPORT_PRUNED: Final = Statement("""
INSERT INTO {schema}.pruned_table (producer_group, alias, name, keep_seconds, pruned_to)
VALUES (%(group)s, %(alias)s, %(name)s, %(keep)s, %(pruned_to)s)
ON CONFLICT (producer_group, alias, name)
DO UPDATE SET keep_seconds = excluded.keep_seconds, pruned_to = excluded.pruned_to
""")


def report_pruned(
    run: Executor, producer_group: str, alias: str, name: str, *, keep_seconds: float, pruned_to: datetime
) -> None:
    """Store that pruning has examined all rows before `pruned_to` in the table `name` (LEDGER, INBOX) on `alias`."""
    place = {"group": producer_group, "alias": alias, "name": name}
    run.execute(_REPORT_PRUNED, {**place, "keep": float(keep_seconds), "pruned_to": pruned_to})


_FORGET: Final = Statement("""
DELETE FROM {schema}.pruned_table WHERE producer_group = %(group)s AND alias <> ALL (%(aliases)s::text[])
""")


def forget_other_aliases(run: Executor, producer_group: str, aliases: Sequence[str]) -> None:
    """Remove the rows of databases that the service no longer has."""
    run.execute(_FORGET, {"group": producer_group, "aliases": arrays.texts(list(aliases))})


_PRUNING_BEHIND: Final = Statement("""
SELECT producer_group, alias, name AS table,
       extract(epoch FROM clock_timestamp() - pruned_to)::double precision - keep_seconds AS behind_seconds,
       keep_seconds
FROM {schema}.pruned_table ORDER BY behind_seconds DESC
""")


def pruning_behind(run: Executor) -> list[dict[str, Any]]:
    """Return facts about every table that any service has reported, the latest first.

    `behind_seconds`: since the oldest row that pruning has not examined became due.
    """
    return run.objects(dict, _PRUNING_BEHIND)
