"""A process may use a remembered position only in the same life of the broker in which it read the position.

A crash of the server loses the ticks that had not reached the disk. A failover or a restore may lose more ticks. Later
ticks then give the offsets of the lost ticks to other messages. So each start, crash, promotion or restore of the
server begins a new life. A restore may leave the connections of running processes open. Therefore each process that
remembers positions reads the life on each new connection, and in each round of its coordinator.

The first process that reads the life after a start, crash, promotion or restore begins the new life. This process
raises the epochs of the leases, so that no process can store anything under an older epoch. If a stored offset is
beyond the end of its queue, the process moves the offset back to that end. The leader makes no tick before the new life
has begun.

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
    """For each life after `life`, return the heads of the queues at the beginning of that life, by queue id.

    If a queue is missing in a mapping, its head was 0.

    For an unknown `life`, this function returns the heads of all lives. Too many heads only make a process read
    messages again, but a missing head could make a process skip messages.
    """
    rows = run.rows(_HEADS_SINCE, {"life": life})
    return [dict(zip(queue_ids, heads, strict=True)) for queue_ids, heads in rows]
