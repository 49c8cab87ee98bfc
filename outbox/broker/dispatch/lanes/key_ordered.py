"""Key-ordered mode: one call at a time per key, in queue order; a failing message blocks only its key.

All messages of a queue without a key form one serial queue. A batch takes messages of several keys, and of each key a
run.
"""

from __future__ import annotations

from collections.abc import Hashable

from outbox.broker.dispatch.lanes.ordered import OrderedLane, SerialQueue
from outbox.broker.dispatch.work import FetchedEntry, take_run


class KeyOrderedLane(OrderedLane):
    """One serial queue per queue and key."""

    def line_name(self, item: FetchedEntry) -> Hashable:
        """Return the queue (the object, because a queue lost and acquired again is another one) and the key."""
        return (id(item.queue), item.key)

    def fill(self) -> list[FetchedEntry]:
        """Return runs of as many ready keys as fit, or the ready keys of one part of a divided batch."""
        call: list[FetchedEntry] = []
        part = self._ready[0].items[0].part
        while self._ready and len(call) < self._batch and self._ready[0].items[0].part == part:
            line = self._ready.popleft()
            line.busy = True
            call += take_run(line.items, self._batch - len(call))
        return call

    def shed(self, line: SerialQueue) -> None:
        """Keep only the first message of a blocked serial queue: the others are loaded again when it continues."""
        for item in list(line.items)[1:]:
            if not item.shed:
                item.row = None
                item.shed = True
                item.queue.unbuffer()
