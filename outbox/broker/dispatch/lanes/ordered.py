"""The common part of the two ordered modes: serial queues; one call at a time takes their first messages.

In orderly mode a serial queue is a queue. In key-ordered mode it is a key within a queue. A key belongs to one queue,
and a queue to one process. So the order holds across processes, as long as queues are handed over with nothing in
flight.
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
        """Whether none of its messages is running and nothing blocks it."""
        return not self.busy and self.suspended_until is None


class OrderedLane:
    """Serial queues by name. Subclasses define a message's serial queue and how a call is filled."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._lines: dict[Hashable, SerialQueue] = {}
        self._ready: deque[SerialQueue] = deque()
        self._later: list[tuple[float, int, SerialQueue]] = []
        self._numbers = itertools.count()

    def line_name(self, item: FetchedEntry) -> Hashable:
        """Return the name of a message's serial queue: messages of one name are handled one at a time."""
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
        """Return the messages of the next call; empty when there is none."""
        self._resume(now)
        return self.fill() if self._ready else []

    def fill(self) -> list[FetchedEntry]:
        """Return a call from the ready serial queues, of which there is at least one."""
        raise NotImplementedError

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End one `take`; the items in `again` go back to the front of their serial queues until they are due."""
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
        """Free memory of waiting messages when a serial queue is blocked."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on, and serial queues that are then empty."""
        for line in list(self._lines.values()):
            if line.items and line.items[0].queue is queue:
                line.items = deque(item for item in line.items if item.offset < from_offset)
                if not line.items and not line.busy:
                    del self._lines[line.name]
        self._ready = deque(line for line in self._ready if line.items)
        self._later = [entry for entry in self._later if entry[2].items]
        heapq.heapify(self._later)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether a queue has waiting messages that are not blocked."""
        return any(line.items[0].queue is queue for line in self._ready)

    def next_at(self) -> float | None:
        """Return when the first blocked serial queue continues, if there is one."""
        return self._later[0][0] if self._later else None

    def _resume(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            line = heapq.heappop(self._later)[2]
            line.suspended_until = None
            self._ready.append(line)
