"""What the two ordered modes share: lines of messages, of which one call at a time takes the first ones.

Orderly: a line is a queue. Key-ordered: a line is a key within a queue. A key lives in one queue and a queue in one
process, so lines keep their order across processes as long as queues are handed over with nothing in flight.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Sequence

from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.dispatch.work import FetchedEntry


class SerialQueue:
    """Messages to be handled one after the other."""

    __slots__ = ("busy", "items", "name", "suspended_until")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.items: deque[FetchedEntry] = deque()
        self.busy = False
        self.suspended_until: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing of it is running and nothing holds it up."""
        return not self.busy and self.suspended_until is None


class OrderedLane:
    """Lines by name. Subclasses say which line a message belongs to and how a call is filled."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._lines: dict[Hashable, SerialQueue] = {}
        self._ready: deque[SerialQueue] = deque()
        self._later: list[tuple[float, int, SerialQueue]] = []
        self._numbers = itertools.count()

    def line_name(self, item: FetchedEntry) -> Hashable:
        """Messages with one name are handled one at a time."""
        raise NotImplementedError

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        for item in items:
            name = self.line_name(item)
            line = self._lines.get(name)
            if line is None:
                line = self._lines[name] = SerialQueue(name)
            if not line.items and line.idle:
                self._ready.append(line)
            line.items.append(item)
            if line.suspended_until is not None:
                self.shed(line)

    def take(self, now: float) -> list[FetchedEntry]:
        """The messages of the next call; empty when there is none."""
        self._resume(now)
        return self.fill() if self._ready else []

    def fill(self) -> list[FetchedEntry]:
        """A call from the ready lines, of which there is at least one."""
        raise NotImplementedError

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """What one `take` gave is over; those in `again` go back to the front of their lines until they are due."""
        returned: dict[Hashable, list[FetchedEntry]] = {}
        for item in again:
            returned.setdefault(self.line_name(item), []).append(item)
        for name in dict.fromkeys(map(self.line_name, items)):
            line = self._lines.get(name)
            if line is not None:
                self._settle(line, returned.get(name, []))

    def _settle(self, line: SerialQueue, again: Sequence[FetchedEntry]) -> None:
        line.busy = False
        if again:
            at = max(item.due for item in again)
            line.items.extendleft(reversed(again))
            line.suspended_until = at
            self.shed(line)
            heapq.heappush(self._later, (at, next(self._numbers), line))
        elif line.items:
            self._ready.append(line)
        else:
            del self._lines[line.name]

    def shed(self, line: SerialQueue) -> None:
        """A line is held up: a chance to give up memory for what waits in it."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on, and lines that hold nothing then."""
        for line in list(self._lines.values()):
            if line.items and line.items[0].queue is queue:
                line.items = deque(item for item in line.items if item.offset < from_offset)
                if not line.items and not line.busy:
                    del self._lines[line.name]
        self._ready = deque(line for line in self._ready if line.items)
        self._later = [entry for entry in self._later if entry[2].items]
        heapq.heapify(self._later)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether messages of a queue wait that nothing holds up."""
        return any(line.items[0].queue is queue for line in self._ready)

    def next_at(self) -> float | None:
        """When a line that is held up goes on, if one is."""
        return self._later[0][0] if self._later else None

    def _resume(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            line = heapq.heappop(self._later)[2]
            line.suspended_until = None
            self._ready.append(line)
