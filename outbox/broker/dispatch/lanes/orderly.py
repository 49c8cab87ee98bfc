"""Orderly mode: one call at a time per queue, in queue order; a failing message blocks its queue."""

from __future__ import annotations

from collections.abc import Hashable

from outbox.broker.dispatch.lanes.ordered import OrderedLane
from outbox.broker.dispatch.work import FetchedEntry, take_run


class OrderlyLane(OrderedLane):
    """One serial queue per held queue. A batch is a run of one queue."""

    def line_name(self, item: FetchedEntry) -> Hashable:
        """Return the queue: the object, not its key, because a queue lost and acquired again is another one."""
        return id(item.queue)

    def fill(self) -> list[FetchedEntry]:
        """Return a run of the queue that has been ready for longest."""
        line = self._ready.popleft()
        line.busy = True
        return take_run(line.items, self._batch)
