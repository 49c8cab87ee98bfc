"""A lane in concurrent mode that calls the handler for one name after the other: the base of the lanes of parts.

A name, such as a key, may have far more messages than the others. Each call has one message, of the name that has
waited longest. The lane keeps few rows in memory, so that the process fetches on and finds the messages of other names
behind those of a flood. It loads the rows of the other messages again before their calls.

    class ByTag(RoundRobinLane[NamedQueue]):
        def __init__(self, option: ByTagOption) -> None:
            super().__init__(NamedQueue)
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, Generic, TypeVar

from outbox.broker.consumer.fetch import BODY
from outbox.broker.consumer.owned_queue import OwnedQueue
from outbox.broker.consumer.work import FetchedEntry

# A fetched message keeps its row if its name has fewer messages and its queue fewer rows in memory than these numbers.
# With the second one, the process still fetches (`room_of`).
_ROWS_OF_NAME: Final = 16
_ROWS_OF_QUEUE: Final = 128
# One statement loads about this number of messages again.
_LOADED_AT_ONCE: Final = 64
# If calls of this number of names may start, the lane keeps all rows, and the process soon stops fetching. So messages
# with a new name each do not fill the memory.
_MOST_READY: Final = 1_000


class NamedQueue:
    """The waiting messages of one name.

    `is_ready`: whether the name waits for its next call. `shed`: the messages whose rows, with small bodies, this
    process has dropped; some of them may be loaded again.
    """

    __slots__ = ("is_ready", "items", "name", "shed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: deque[FetchedEntry] = deque()
        self.shed: deque[FetchedEntry] = deque()
        self.is_ready = False


Named = TypeVar("Named", bound=NamedQueue)


class RoundRobinLane(Generic[Named]):
    """A lane whose calls have one message. `FetchedEntry.key` is the name of a message."""

    def __init__(self, make: Callable[[str], Named]) -> None:
        self._make = make
        self._names: dict[str, Named] = {}
        # The names of which a call may start; the name that has waited longest is the first one.
        self._ready: deque[Named] = deque()
        self._later: list[tuple[float, int, FetchedEntry]] = []
        self._numbers = itertools.count()
        self.waiting = 0

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages of one queue, in queue order."""
        following = len(items)
        for item in items:
            named = self.named(item.key)
            # One text for all messages of the name.
            item.key = named.name
            is_long = len(named.items) >= _ROWS_OF_NAME or item.queue.buffered - following >= _ROWS_OF_QUEUE
            following -= 1
            if is_long and len(self._ready) < _MOST_READY:
                # A large body is loaded for its own call only.
                if item.row and item.row[BODY] is not None:
                    named.shed.append(item)
                item.row = None
                item.shed = True
                item.queue.unbuffer()
            named.items.append(item)
            self.waiting += 1
            self.schedule(named)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the message of the next call; an empty list if no message may be handled now."""
        self.wake(now)
        while self._ready:
            named = self._ready.popleft()
            named.is_ready = False
            if named.items:
                item = named.items.popleft()
                self.waiting -= 1
                self.schedule(named)
                self.shortened(named)
                return [item]
        return []

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        A later `take` returns the items in `again` when they are due.
        """
        for item in again:
            heapq.heappush(self._later, (item.due, next(self._numbers), item))

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Drop the waiting messages of a queue whose offset is `from_offset` or higher."""

        def stays(item: FetchedEntry) -> bool:
            return item.queue is not queue or item.offset < from_offset

        for named in list(self._names.values()):
            if not all(map(stays, named.items)):
                kept = deque(filter(stays, named.items))
                self.waiting -= len(named.items) - len(kept)
                named.items = kept
                named.shed = deque(filter(stays, named.shed))
                self.shortened(named)
        self._later = [entry for entry in self._later if stays(entry[2])]
        heapq.heapify(self._later)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages of which a call may start."""
        return any(item.queue is queue for named in self._ready for item in named.items)

    def next_at(self) -> float | None:
        """Return the time at which the first failed message is due; None if no failed message waits."""
        return self._later[0][0] if self._later else None

    def wake(self, now: float) -> None:
        """Put the failed messages that are due now before the other messages of their names."""
        while self._later and self._later[0][0] <= now:
            item = heapq.heappop(self._later)[2]
            named = self.named(item.key)
            named.items.appendleft(item)
            self.waiting += 1
            self.schedule(named)

    def startable(self, most: int) -> int:
        """Return how many messages may be handled now, at most `most`."""
        return min(most, self.waiting)

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return messages without rows that start soon after `item`. The caller loads them in the same statement."""
        found: list[FetchedEntry] = []
        own = self._names.get(item.key)
        of_each = max(1, _LOADED_AT_ONCE // (1 + len(self._ready)))
        for named in chain([] if own is None else [own], self._ready):
            if named is not own and not (named.items and named.items[0].shed):
                continue
            count = len(found)
            while named.shed and len(found) < count + of_each:
                if (other := named.shed.popleft()).shed and other is not item:
                    found.append(other)
            if len(found) >= _LOADED_AT_ONCE:
                break
        return found

    # -- for subclasses -------------------------------------------------------------------------

    def named(self, name: str) -> Named:
        """Return the messages of a name."""
        named = self._names.get(name)
        if named is None:
            named = self._names[name] = self._make(name)
        return named

    def schedule(self, named: Named) -> None:
        """Let a name with messages wait for its next call."""
        if named.items and not named.is_ready:
            named.is_ready = True
            self._ready.append(named)

    def shortened(self, named: Named) -> None:
        """Note that messages of a name have left the lane."""
        if not named.items:
            self._names.pop(named.name, None)
