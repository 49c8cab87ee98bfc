"""The lives of the broker: positions that a process remembers count only in the life in which it read them.

A crash of the server loses the ticks that had not reached the disk, a failover or a restore loses more; afterwards
other messages get their offsets. A start, a crash, a promotion and a restore each begin a new life. A restore may
leave the connections of running processes open: so each process that keeps positions asks for the life on each new
connection, and in each turn of its coordinator.

The first process that asks in a new life begins it: the leases' epochs grow, so that nothing more is stored under those
of before, and offsets beyond the queues' ends are taken back. No tick is made in a life that has not begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

_LASTING = Statement("SELECT {schema}.lasting_life_v18()")
_BEGIN = Statement("SELECT {schema}.begin_life_v18()")


def current(run: Executor) -> UUID:
    """The life that lasts, begun here if no process has; on a connection in autocommit, outside a transaction."""
    life: UUID = run.one(_LASTING)[0] or run.one(_BEGIN)[0]
    return life


@dataclass(frozen=True, slots=True)
class Life:
    """One life: when it began, and when the newest message that it began with was stored (None without any)."""

    life_id: UUID
    began_at: datetime
    stored_until: datetime | None


_LIFE = Statement("SELECT life_id, began_at, stored_until FROM {schema}.life WHERE life_id = %(life)s")


def described(run: Executor) -> Life:
    """The life that lasts, begun here if no process has."""
    [life] = run.objects(Life, _LIFE, {"life": current(run)})
    return life


_HEADS_SINCE = Statement("""
SELECT queue_ids, heads FROM {schema}.life
WHERE ordinal > coalesce((SELECT known.ordinal FROM {schema}.life known WHERE known.life_id = %(life)s), 0)
""")


def heads_since(run: Executor, life: UUID) -> Sequence[Mapping[int, int]]:
    """The next offsets by queue id with which each later life began; a queue that is missing had none: 0.

    Of a life that is not known any more all that are: too many rather than too few.
    """
    rows = run.rows(_HEADS_SINCE, {"life": life})
    return [dict(zip(queue_ids, heads, strict=True)) for queue_ids, heads in rows]
