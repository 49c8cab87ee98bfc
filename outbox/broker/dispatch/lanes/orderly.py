"""Orderly mode: one call at a time per queue, in queue order; a failing message holds up its queue."""

from __future__ import annotations

from collections.abc import Hashable

from outbox.broker.dispatch.lanes.ordered import OrderedLane
from outbox.broker.dispatch.work import FetchedEntry, take_run


class OrderlyLane(OrderedLane):
    """A line per held queue. A batch is a run of one queue."""

    def line_name(self, item: FetchedEntry) -> Hashable:
        """The queue: the object, not its key, since a queue that was lost and came back is another one."""
        return id(item.queue)

    def fill(self) -> list[FetchedEntry]:
        """A run of the queue that has been ready for longest."""
        line = self._ready.popleft()
        line.busy = True
        return take_run(line.items, self._batch)
