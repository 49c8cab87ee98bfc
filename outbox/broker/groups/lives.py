"""The lives of the server: what is remembered of positions counts only in the life in which it was read.

A crash of the server takes the ticks that had not reached the disk, a failover or a restore takes more; afterwards
other messages get their offsets. A connection ends with the life in which it was made, so whoever keeps positions in
memory asks for the life on each new connection, and forgets what it has from another one.

The first who asks in a new life begins it: the leases' epochs grow, so that nothing more is stored under those of
before, and offsets that are ahead of what is there are taken back. No tick is made in a life that has not begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

_LASTING = Statement("""
SELECT life_id FROM {schema}.life_sign JOIN {schema}.life USING (life_id)
WHERE life_sign.server = {schema}.this_server_v15()
""")
_BEGIN = Statement("SELECT {schema}.begin_life_v15()")


def current(run: Executor) -> UUID:
    """The life of the server, begun here if nobody has; on a connection in autocommit, outside a transaction."""
    row = run.row(_LASTING) or run.one(_BEGIN)
    life: UUID = row[0]
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
