"""The two ordered modes: serial queues; one call at a time takes their first messages.

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
from outbox.broker.dispatch.work import FetchedEntry, take_run


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
        self._serials: dict[Hashable, SerialQueue] = {}
        self._ready: deque[SerialQueue] = deque()
        self._later: list[tuple[float, int, SerialQueue]] = []
        self._numbers = itertools.count()

    def serial_name(self, item: FetchedEntry) -> Hashable:
        """Return the name of a message's serial queue: messages of one name are handled one at a time."""
        raise NotImplementedError

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        for item in items:
            name = self.serial_name(item)
            serial = self._serials.get(name)
            if serial is None:
                serial = self._serials[name] = SerialQueue(name)
            if not serial.items and serial.idle:
                self._ready.append(serial)
            serial.items.append(item)
            if serial.suspended_until is not None:
                self.shed(serial)

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
            returned.setdefault(self.serial_name(item), []).append(item)
        for name in dict.fromkeys(map(self.serial_name, items)):
            serial = self._serials.get(name)
            if serial is not None:
                self._settle(serial, returned.get(name, []))

    def _settle(self, serial: SerialQueue, again: Sequence[FetchedEntry]) -> None:
        serial.busy = False
        if again:
            at = max(item.due for item in again)
            serial.items.extendleft(reversed(again))
            serial.suspended_until = at
            self.shed(serial)
            heapq.heappush(self._later, (at, next(self._numbers), serial))
        elif serial.items:
            self._ready.append(serial)
        else:
            del self._serials[serial.name]

    def shed(self, serial: SerialQueue) -> None:
        """Free memory of waiting messages when a serial queue is blocked."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on, and serial queues that are then empty."""
        for serial in list(self._serials.values()):
            if serial.items and serial.items[0].queue is queue:
                serial.items = deque(item for item in serial.items if item.offset < from_offset)
                if not serial.items and not serial.busy:
                    del self._serials[serial.name]
        self._ready = deque(serial for serial in self._ready if serial.items)
        self._later = [entry for entry in self._later if entry[2].items]
        heapq.heapify(self._later)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether a queue has waiting messages that are not blocked."""
        return any(serial.items[0].queue is queue for serial in self._ready)

    def next_at(self) -> float | None:
        """Return when the first blocked serial queue continues, if there is one."""
        return self._later[0][0] if self._later else None

    def _resume(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            serial = heapq.heappop(self._later)[2]
            serial.suspended_until = None
            self._ready.append(serial)


class OrderlyLane(OrderedLane):
    """Orderly mode: one call at a time per queue, in queue order; a failing message blocks its queue.

    A batch is a run of one queue.
    """

    def serial_name(self, item: FetchedEntry) -> Hashable:
        """Return the queue: the object, not its key, because a queue lost and acquired again is another one."""
        return id(item.queue)

    def fill(self) -> list[FetchedEntry]:
        """Return a run of the queue that has been ready for longest."""
        serial = self._ready.popleft()
        serial.busy = True
        return take_run(serial.items, self._batch)


class KeyOrderedLane(OrderedLane):
    """Key-ordered mode: one call at a time per key, in queue order; a failing message blocks only its key.

    All messages of a queue without a key form one serial queue. A batch takes messages of several keys, and of each
    key a run.
    """

    def serial_name(self, item: FetchedEntry) -> Hashable:
        """Return the queue (the object, because a queue lost and acquired again is another one) and the key."""
        return (id(item.queue), item.key)

    def fill(self) -> list[FetchedEntry]:
        """Return runs of as many ready keys as fit, or the ready keys of one part of a divided batch."""
        call: list[FetchedEntry] = []
        part = self._ready[0].items[0].part
        while self._ready and len(call) < self._batch and self._ready[0].items[0].part == part:
            serial = self._ready.popleft()
            serial.busy = True
            call += take_run(serial.items, self._batch - len(call))
        return call

    def shed(self, serial: SerialQueue) -> None:
        """Keep only the first message of a blocked serial queue: the others are loaded again when it continues."""
        for item in list(serial.items)[1:]:
            if not item.shed:
                item.row = None
                item.shed = True
                item.queue.unbuffer()
