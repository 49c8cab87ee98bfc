"""A queue lease is the right of one consumer process to consume a queue for a group, for a limited time.

A lease is a row with an owner, an epoch, and an end by the clock of the database. The **epoch** is the fencing token.
The epoch grows with every change of owner, and every stored offset has the epoch of its lease. An offset that was
stored under an older epoch never counts.

- Term: a lease lasts for `lease_seconds`. A separate thread with its own connection renews the lease three times per
  term, so a queue keeps its owner during a long handler call.
- Trust: if a renewal succeeds, the owner relies on its lease for `lease_seconds` from the time *before* it sent the
  renewal, by a monotonic clock that also counts while the machine sleeps. In the database, the lease never ends before.
- Failure: if no renewal has succeeded for `lease_seconds`, the owner starts no more handlers; after a freeze, it finds
  its lease expired as soon as it runs again. Handlers that were running when the lease expired may still take effect.
  Two checks prevent that a message takes effect twice: the inbox stores only one row per message, and an invoker calls
  `outbox.utils.fence.check` before it commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

QueueKey = tuple[int, int]
"""(group_id, queue_id)"""


def _clock() -> Callable[[], float]:
    """Return a clock that never goes back and, if the system has such a clock, also counts while the machine sleeps."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if boottime is None else partial(time.clock_gettime, boottime)


lease_clock: Final = _clock()


@dataclass(slots=True)
class Lease:
    """A lease of this process in one `life` of the server. Only the coordinator's thread extends `trusted_until`."""

    key: QueueKey
    epoch: int
    trusted_until: float
    life: UUID

    def trusted(self) -> bool:
        """Return whether the owner may still rely on this lease."""
        return lease_clock() < self.trusted_until


_ACQUIRE = Statement("""
INSERT INTO {schema}.queue_lease AS held (group_id, queue_id, owner, epoch, expires_at)
SELECT %(group_id)s, wanted.queue_id, %(owner)s, 1, clock_timestamp() + make_interval(secs => %(term)s)
FROM unnest(%(queue_ids)s::integer[]) AS wanted (queue_id)
ORDER BY wanted.queue_id
ON CONFLICT (group_id, queue_id) DO UPDATE
SET owner = excluded.owner, epoch = held.epoch + 1, expires_at = excluded.expires_at
WHERE held.owner IS NULL OR held.owner = excluded.owner OR held.expires_at < clock_timestamp()
RETURNING queue_id, epoch
""")


def acquire(
    run: Executor, owner: UUID, group_id: int, queue_ids: Sequence[int], *, life: UUID, term_seconds: float
) -> list[Lease]:
    """Acquire leases that are free, expired, or already stored for this owner. Return the acquired leases."""
    sent = lease_clock()
    wanted = {"group_id": group_id, "queue_ids": arrays.integers(queue_ids)}
    rows = run.execute(_ACQUIRE, {**wanted, "owner": owner, "term": term_seconds})
    return [Lease((group_id, queue_id), epoch, sent + term_seconds, life) for queue_id, epoch in rows]


# Those of the given leases that the owner still holds. All statements lock the rows in the same order, so that no two
# can deadlock.
_THAT_ARE_OURS: Final = """
FROM (
    SELECT * FROM unnest(%(group_ids)s::integer[], %(queue_ids)s::integer[], %(epochs)s::bigint[])
        AS mine (group_id, queue_id, epoch)
    JOIN {schema}.queue_lease USING (group_id, queue_id, epoch)
    WHERE owner = %(owner)s
    ORDER BY group_id, queue_id
    FOR UPDATE
) AS mine
WHERE held.group_id = mine.group_id AND held.queue_id = mine.queue_id
"""

_RENEW = Statement(f"""
UPDATE {{schema}}.queue_lease AS held
SET expires_at = clock_timestamp() + make_interval(secs => %(term)s)
{_THAT_ARE_OURS}RETURNING held.group_id, held.queue_id""")


def renew(run: Executor, owner: UUID, held: Sequence[Lease], *, term_seconds: float) -> set[QueueKey]:
    """Prolong leases. Return the keys of those that this owner still holds."""
    sent = lease_clock()
    rows = run.execute(_RENEW, _named(owner, held) | {"term": term_seconds})
    kept = {(group_id, queue_id) for group_id, queue_id in rows}
    for lease in held:
        if lease.key in kept:
            lease.trusted_until = sent + term_seconds
    return kept


_RELEASE = Statement(
    "UPDATE {schema}.queue_lease AS held SET owner = NULL, expires_at = clock_timestamp()" + _THAT_ARE_OURS
)


def release(run: Executor, owner: UUID, held: Sequence[Lease]) -> int:
    """Release leases, so that other processes can acquire them at once. The epoch stays; the next owner raises it."""
    return run.count(_RELEASE, _named(owner, held))


_RELEASE_ALL = Statement("""
WITH led AS (
    UPDATE {schema}.leader_lease SET owner = NULL, expires_at = clock_timestamp() WHERE owner = %(owner)s
)
UPDATE {schema}.queue_lease SET owner = NULL, expires_at = clock_timestamp() WHERE owner = %(owner)s
""")


def release_all(run: Executor, owner: UUID) -> int:
    """Release the queues, and the lead, of an owner whose process has certainly ended. Return the number of queues."""
    return run.count(_RELEASE_ALL, {"owner": owner})


_STOP = Statement("""
UPDATE {schema}.queue_lease SET stopped = %(reason)s
WHERE group_id = %(group_id)s AND queue_id = %(queue_id)s AND epoch = %(epoch)s AND owner = %(owner)s
""")


def stop(run: Executor, owner: UUID, lease: Lease, reason: str) -> bool:
    """Mark a queue as stopped by on_error=STOP of a subscription. Return False if this owner has lost the lease."""
    group_id, queue_id = lease.key
    place = {"group_id": group_id, "queue_id": queue_id, "epoch": lease.epoch, "owner": owner}
    return run.count(_STOP, {**place, "reason": reason}) == 1


def _named(owner: UUID, held: Sequence[Lease]) -> dict[str, object]:
    return {
        "owner": owner,
        "group_ids": arrays.integers([lease.key[0] for lease in held]),
        "queue_ids": arrays.integers([lease.key[1] for lease in held]),
        "epochs": arrays.bigints([lease.epoch for lease in held]),
    }
