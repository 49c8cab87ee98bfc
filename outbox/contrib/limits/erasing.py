"""Removes the keys of a person's messages from the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# The keys of the messages, if they are to be replaced.
_OLD_KEYS: Final = """(
    SELECT key FROM {schema}.commit_log
    WHERE log_id = ANY(%(log_ids)s::bigint[]) AND %(replacement)s::text IS NOT NULL AND NOT starts_with(key, 'erased:')
)"""
_RELEASE: Final = Statement("DELETE FROM {schema}.slot WHERE topic_id = %(topic_id)s AND key IN " + _OLD_KEYS)
_FORGET: Final = Statement(
    "UPDATE {schema}.slot_demand SET keys = '{{}}' WHERE topic_id = %(topic_id)s AND keys && ARRAY" + _OLD_KEYS
)


def release_keys(run: Executor, values: Mapping[str, Any]) -> int:
    """Delete the slots of these keys. Their instances notice it at the next heartbeat, as after a server's crash."""
    return run.count(_RELEASE, values)


def forget_keys(run: Executor, values: Mapping[str, Any]) -> int:
    """Remove the keys from the demands that contain one of them. Return the number of these demands."""
    return run.count(_FORGET, values)
