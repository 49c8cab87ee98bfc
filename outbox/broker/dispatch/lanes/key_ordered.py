"""Key-ordered mode: one call at a time per key, in queue order; a failing message holds up its key only.

Messages without a key form a line of their own per queue. A batch takes from several keys, and of each key a run.
"""

from __future__ import annotations

from collections.abc import Hashable

from outbox.broker.dispatch.lanes.ordered import OrderedLane, SerialQueue
from outbox.broker.dispatch.work import FetchedEntry, take_run


class KeyOrderedLane(OrderedLane):
    """A line per queue and key."""

    def line_name(self, item: FetchedEntry) -> Hashable:
        """The queue (the object: one that was lost and came back is another) and the key."""
        return (id(item.queue), item.key)

    def fill(self) -> list[FetchedEntry]:
        """Runs of as many ready keys as it takes, or the ready keys of one part of a divided batch."""
        call: list[FetchedEntry] = []
        part = self._ready[0].items[0].part
        while self._ready and len(call) < self._batch and self._ready[0].items[0].part == part:
            line = self._ready.popleft()
            line.busy = True
            call += take_run(line.items, self._batch - len(call))
        return call

    def shed(self, line: SerialQueue) -> None:
        """Keep only the first message of a line that is held up: the others are loaded again when it goes on."""
        for item in list(line.items)[1:]:
            if not item.shed:
                item.row = None
                item.shed = True
                item.queue.unbuffer()
