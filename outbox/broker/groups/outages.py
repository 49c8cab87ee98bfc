"""Rows for operators about subscriptions that pause because a service their handlers need is down."""

from __future__ import annotations

from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

_REPORT = Statement("""
INSERT INTO {schema}.outage AS known (instance_id, group_id, topic_id, error)
VALUES (%(instance)s, %(group_id)s, %(topic_id)s, %(error)s)
ON CONFLICT (instance_id, group_id, topic_id) DO UPDATE SET error = excluded.error, seen_at = clock_timestamp()
""")


def report(run: Executor, instance: UUID, group_id: int, topic_id: int, error: str) -> None:
    """Record that a subscription of this instance pauses, or that a call after a pause has failed again."""
    run.execute(_REPORT, {"instance": instance, "group_id": group_id, "topic_id": topic_id, "error": error})


_END = Statement("""
DELETE FROM {schema}.outage
WHERE instance_id = %(instance)s AND group_id = %(group_id)s AND topic_id = %(topic_id)s
""")


def end(run: Executor, instance: UUID, group_id: int, topic_id: int) -> None:
    """Record that the subscription continues."""
    run.execute(_END, {"instance": instance, "group_id": group_id, "topic_id": topic_id})


_FORGET = Statement("""
DELETE FROM {schema}.outage o
WHERE o.instance_id = %(instance)s OR o.seen_at < clock_timestamp() - interval '1 day'
""")


def forget(run: Executor, instance: UUID) -> None:
    """Delete the rows of an instance that leaves, and rows that no instance has updated for a day."""
    run.execute(_FORGET, {"instance": instance})
