"""Lives of the broker: a process may use a remembered position only in the life in which it read it.

A crash of the server loses the ticks that had not reached the disk. A failover or a restore loses more. Afterwards
other messages get the lost offsets. So a start, a crash, a promotion and a restore each begin a new life. A restore may
leave the connections of running processes open. Therefore each process that keeps positions asks for the life on each
new connection, and in each turn of its coordinator.

The first process that asks in a new life begins it. It raises the leases' epochs, so that no process can store anything
under an older one. It also takes back offsets beyond the queues' ends. The leader makes no tick before the new life has
begun.

See decision 170.
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
    """Return the present life, and begin it if no process has.

    The connection is in autocommit, outside a transaction.
    """
    life: UUID = run.one(_LASTING)[0] or run.one(_BEGIN)[0]
    return life


@dataclass(frozen=True, slots=True)
class Life:
    """One life: when it began, and when the newest message at its beginning was stored (None without any)."""

    life_id: UUID
    began_at: datetime
    stored_until: datetime | None


_LIFE = Statement("SELECT life_id, began_at, stored_until FROM {schema}.life WHERE life_id = %(life)s")


def described(run: Executor) -> Life:
    """Return the present life, and begin it if no process has."""
    [life] = run.objects(Life, _LIFE, {"life": current(run)})
    return life


_HEADS_SINCE = Statement("""
SELECT queue_ids, heads FROM {schema}.life
WHERE ordinal > coalesce((SELECT known.ordinal FROM {schema}.life known WHERE known.life_id = %(life)s), 0)
""")


def heads_since(run: Executor, life: UUID) -> Sequence[Mapping[int, int]]:
    """Return the next offsets by queue id at the beginning of each later life; a missing queue had none: 0.

    For an unknown life it returns those of all lives: too many are safe, too few are not.
    """
    rows = run.rows(_HEADS_SINCE, {"life": life})
    return [dict(zip(queue_ids, heads, strict=True)) for queue_ids, heads in rows]
