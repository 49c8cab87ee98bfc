"""The broker's side of large bodies: which objects of a storage have a message, and the lock that orders both sides.

A publisher holds the lock of its message in shared mode until the message is visible. The pass that removes objects
takes the lock exclusively, then reads which messages exist, and removes objects while it holds the lock. So a publisher
either finds its object removed, and refuses the message, or the pass sees the message. See decision 265.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

from outbox.broker.database.arrays import integers, uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# A transaction takes at most this number of locks, however many large messages it publishes: the server has memory for
# some thousand locks.
BUCKETS: Final = 64
# The first of the two numbers of the locks. It separates them from other locks of the database.
_SPACE: Final = 1_817_320_296

_HOLD: Final = Statement(
    "SELECT pg_advisory_xact_lock_shared(%(space)s::integer, bucket) FROM unnest(%(buckets)s::integer[]) AS bucket"
)
_TRY: Final = Statement("SELECT pg_try_advisory_xact_lock(%(space)s::integer, %(bucket)s::integer)")


def bucket_of(message_id: UUID) -> int:
    """Return the number of the lock of this message."""
    return message_id.int % BUCKETS


def hold(run: Executor, message_ids: Iterable[UUID]) -> None:
    """Lock these messages against the removal of their objects, until the open transaction ends."""
    run.execute(_HOLD, {"space": _SPACE, "buckets": integers(sorted(set(map(bucket_of, message_ids))))})


def try_bucket(run: Executor, bucket: int) -> bool:
    """Lock all messages of the bucket until the open transaction ends, if no publisher holds one of them."""
    return bool(run.one(_TRY, {"space": _SPACE, "bucket": bucket})[0])


_CONTENT_TYPES: Final = Statement("""
SELECT given.id, log.content_type
FROM unnest(%(ids)s::uuid[]) AS given (id)
CROSS JOIN LATERAL (SELECT content_type FROM {schema}.commit_log WHERE message_id = given.id OFFSET 0) AS log
""")


def content_types(run: Executor, message_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Return the content type of each of these messages that the log has, in any state."""
    return dict(run.rows(_CONTENT_TYPES, {"ids": uuids(message_ids)}))


_OWNER: Final = Statement("""
SELECT concat_ws('.', (SELECT system_identifier FROM pg_control_system()),
                 (SELECT oid FROM pg_database WHERE datname = current_database()), '{schema}.commit_log'::regclass::oid)
""")


def owner(run: Executor) -> str:
    """Return a text that names these tables: a restored or copied table has another text."""
    return str(run.one(_OWNER)[0])
