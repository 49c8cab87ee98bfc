"""Switches of the operator: a consumer group (pause, resume, inbox generation), and transactional messages."""

from __future__ import annotations

import logging

from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups.registration import unknown_group

logger = logging.getLogger(__name__)

_PAUSE = Statement("UPDATE {schema}.consumer_group SET paused = %(paused)s WHERE name = %(name)s RETURNING group_id")
_RESUME_QUEUES = Statement("""
UPDATE {schema}.queue_lease SET stopped = NULL WHERE group_id = %(group_id)s AND stopped IS NOT NULL
""")
_RAISE_GENERATION = Statement("""
UPDATE {schema}.consumer_group SET generation = generation + 1 WHERE name = %(name)s RETURNING generation
""")

_REJECT = Statement("""
UPDATE {schema}.broker SET reject_transactional = %(rejecting)s WHERE reject_transactional <> %(rejecting)s
""")

_REJECTS = Statement("SELECT reject_transactional FROM {schema}.broker")


def rejects_transactional(run: Executor) -> bool:
    """Whether the broker refuses new transactional messages."""
    [rejecting] = run.one(_REJECTS)
    return bool(rejecting)


def reject_transactional(run: Executor, rejecting: bool) -> bool:
    """Refuse new transactional messages on both paths, or accept them again; returns whether that was a change."""
    changed = run.count(_REJECT, {"rejecting": rejecting}) > 0
    if changed:
        logger.warning("transactional messages are %s from now on", "refused" if rejecting else "accepted")
    return changed


def pause(run: Executor, group: str) -> None:
    """Stop the group from starting handlers, within about a second; positions stay. Raises UnknownGroup."""
    if run.row(_PAUSE, {"name": group, "paused": True}) is None:
        raise unknown_group(group)
    notify(run, Channel.SHARED)


def resume(run: Executor, group: str) -> int:
    """Undo `pause` and continue queues that on_error=STOP stopped; returns how many. Raises UnknownGroup."""
    with run.connection.transaction():
        row = run.row(_PAUSE, {"name": group, "paused": False})
        if row is None:
            raise unknown_group(group)
        resumed = run.count(_RESUME_QUEUES, {"group_id": row[0]})
    notify(run, Channel.SHARED)
    return resumed


def raise_generation(run: Executor, group: str) -> int:
    """Start a new inbox generation and return it. Messages that the inbox knows are then processed again."""
    row = run.row(_RAISE_GENERATION, {"name": group})
    if row is None:
        raise unknown_group(group)
    return int(row[0])
