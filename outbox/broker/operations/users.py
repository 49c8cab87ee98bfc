"""Who publishes to a broker and consumes from it."""

from __future__ import annotations

from collections.abc import Sequence

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
