"""A process may use a remembered position only in the same life of the broker in which it read the position.

A crash of the server, a failover or a restore may lose ticks, and later ticks give their offsets to other messages. So
each start, crash, promotion or restore of the server begins a new life. A restore may leave connections open, so each
process that remembers positions reads the life on each new connection, and in each round of its coordinator.

The first process that reads the life afterwards begins it: it raises the epochs of the leases, so that no process can
store anything under an older one, and moves offsets beyond the end of their queue back. The leader makes no tick
before.

See decision 145.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement

_LASTING = Statement("SELECT {schema}.present_life()")
_BEGIN = Statement("SELECT {schema}.begin_life()")


def current(run: Executor) -> UUID:
    """Return the present life. If no process has begun the present life yet, begin this life now.

    The connection must be in autocommit mode, outside a transaction.
    """
    life: UUID = run.one(_LASTING)[0] or run.one(_BEGIN)[0]
    return life


_LIFE = Statement("SELECT life_id, began_at, stored_until FROM {schema}.life WHERE life_id = %(life)s")


def described(run: Executor) -> Row:
    """Like `current`, but return its `life_id`, `began_at`, and when the last message before it was stored, or None."""
    return run.objects(Row, _LIFE, {"life": current(run)})[0]


_HEADS_SINCE = Statement("""
SELECT queue_ids, heads FROM {schema}.life
WHERE ordinal > coalesce((SELECT known.ordinal FROM {schema}.life known WHERE known.life_id = %(life)s), 0)
""")


def heads_since(run: Executor, life: UUID) -> Sequence[Mapping[int, int]]:
    """For each life after `life`, return the heads of the queues at its beginning, by queue id; 0 for a missing queue.

    For an unknown `life`, it returns the heads of all: too many heads only make a process read messages again.
    """
    rows = run.rows(_HEADS_SINCE, {"life": life})
    return [dict(zip(queue_ids, heads, strict=True)) for queue_ids, heads in rows]
