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
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

_LASTING = Statement("SELECT {schema}.present_life()")
_BEGIN = Statement("SELECT {schema}.begin_life()")


def current(run: Executor) -> UUID:
    """Return the present life. If no process has begun the present life yet, begin this life now.

    The connection must be in autocommit mode, outside a transaction.
    """
    life: UUID = run.one(_LASTING)[0] or run.one(_BEGIN)[0]
    return life


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the broker.

    `began_at`: the time at which the life began. `stored_until`: the time at which the last message before this life
    was stored; None if there was no message.
    """

    life_id: UUID
    began_at: datetime
    stored_until: datetime | None


_LIFE = Statement("SELECT life_id, began_at, stored_until FROM {schema}.life WHERE life_id = %(life)s")


def described(run: Executor) -> Life:
    """Return the present life. If no process has begun the present life yet, begin this life now."""
    [life] = run.objects(Life, _LIFE, {"life": current(run)})
    return life


_HEADS_SINCE = Statement("""
SELECT queue_ids, heads FROM {schema}.life
WHERE ordinal > coalesce((SELECT known.ordinal FROM {schema}.life known WHERE known.life_id = %(life)s), 0)
""")


def heads_since(run: Executor, life: UUID) -> Sequence[Mapping[int, int]]:
    """For each life after `life`, return the heads of the queues at its beginning, by queue id; 0 for a missing queue.

    For an unknown `life`, it returns the heads of all: too many heads only make a process read messages again, but a
    missing one could make it skip messages.
    """
    rows = run.rows(_HEADS_SINCE, {"life": life})
    return [dict(zip(queue_ids, heads, strict=True)) for queue_ids, heads in rows]
