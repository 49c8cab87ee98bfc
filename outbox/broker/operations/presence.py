"""What a broker knows of a project: its groups, its messages, its transactions."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Whether one of the consumer groups is known here, or messages of the producer group are still stored."""
    parameters = {"producer_group": producer_group, "groups": arrays.texts(list(consumer_groups))}
    return bool(run.one(_IS_USED_BY, parameters)[0])


# A transaction has the id of its first message.
_UNKNOWN = Statement("""
SELECT given.id FROM unnest(%(ids)s::uuid[]) AS given (id)
WHERE NOT EXISTS (SELECT FROM {schema}.op_log o WHERE o.transaction_id = given.id)
  AND NOT EXISTS (SELECT FROM {schema}.commit_log l WHERE l.message_id = given.id)
""")


def unknown_transactions(run: Executor, ids: Sequence[UUID]) -> set[UUID]:
    """Those of which there is neither a half message nor a decision here."""
    return {found for (found,) in run.rows(_UNKNOWN, {"ids": arrays.uuids(ids)})}
