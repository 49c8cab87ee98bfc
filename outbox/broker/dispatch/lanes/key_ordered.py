"""Key-ordered mode: one call at a time per key, in queue order; a failing message holds up its key only.

Messages without a key form a line of their own per queue. A batch takes from several keys, and of each key a run.
When a batch fails as a whole, its keys are tried again one by one, so that the culprit stops holding up the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from outbox.broker.dispatch.lanes.ordered import Line, OrderedLane
from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.dispatch.work import Item


class KeyOrderedLane(OrderedLane):
    """A line per queue and key."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._alone: set[Hashable] = set()

    def line_name(self, item: Item) -> Hashable:
        """The queue (the object: one that was lost and came back is another) and the key."""
        return (id(item.queue), item.key)

    def fill(self) -> list[Item]:
        """Runs of as many ready keys as it takes; a key that failed goes by itself."""
        call: list[Item] = []
        while self._ready and len(call) < self._batch:
            line = self._ready[0]
            alone = line.name in self._alone
            if alone and call:
                break
            self._ready.popleft()
            line.busy = True
            room = self._batch - len(call)
            call.extend(line.items.popleft() for _ in range(min(room, len(line.items))))
            if alone:
                break
        return call

    def settle(self, items: Sequence[Item], again: Sequence[Item]) -> None:
        """Keys that failed are tried again one by one, until they succeed."""
        failed = {self.line_name(item) for item in again}
        self._alone.difference_update(self.line_name(item) for item in items)
        self._alone |= failed
        super().settle(items, again)

    def shed(self, line: Line) -> None:
        """Keep only the first message of a line that is held up: the others are loaded again when it goes on."""
        for item in list(line.items)[1:]:
            if not item.shed:
                item.row = None
                item.shed = True
                item.queue.unbuffer()

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Also forget which of its keys go by themselves."""
        super().drop(queue, from_offset)
        self._alone = {name for name in self._alone if name in self._lines}
