"""The data of dispatching: fetched entries, the lanes in which they wait (one kind per mode), and the calls that handle
them.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from outbox.broker.consumer.owned_queue import OwnedQueue, Subscribed
from outbox.ports import Disposition

NOT_STARTED = None
"""The result of a delivery whose handler was not called: its queue was lost or is being handed over."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The result of a delivery whose handler is to be called later; `until` is time.monotonic."""

    until: float


Result = Disposition | BaseException | Postponed | None

_parts: Final = itertools.count(1)


class FetchedEntry:
    """One fetched entry. `retries` counts how often it was sent back, `in_place` the attempts here since then.

    `row` is the fetched row (`fetch.Row`). It is None while it is not kept in memory: the body is large, or the entry
    waits behind a blocked key (`shed`). It is then loaded before its call. `part` numbers the part of a divided batch,
    0 for none: a call takes entries of one part only.
    """

    __slots__ = ("due", "in_place", "key", "offset", "part", "queue", "retries", "row", "shed")

    def __init__(self, queue: OwnedQueue, offset: int, retries: int, key: str, row: tuple[Any, ...] | None) -> None:
        self.queue = queue
        self.offset = offset
        self.retries = retries
        self.key = key
        self.row = row
        self.in_place = 0
        self.shed = False
        self.part = 0
        # When it is to be tried here again (time.monotonic), once it failed.
        self.due = 0.0

    @property
    def attempt(self) -> int:
        """The number of the next or running attempt, from 1."""
        return self.retries + self.in_place + 1


def divide(items: Sequence[FetchedEntry], size: int) -> None:
    """Limit later calls to `size` of these entries together, and to none of the others."""
    for start in range(0, len(items), size):
        part = next(_parts)
        for item in items[start : start + size]:
            item.part = part


def take_run(waiting: deque[FetchedEntry], most: int) -> list[FetchedEntry]:
    """Take up to `most` of the first items that belong to one part of a batch, or to none."""
    if not waiting:
        return []
    part = waiting[0].part
    run: list[FetchedEntry] = []
    while waiting and len(run) < most and waiting[0].part == part:
        run.append(waiting.popleft())
    return run


class Lane(Protocol):
    """Keeps fetched messages and decides which of them may be handled next."""

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; empty when there is none."""

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End one `take`; the items in `again` are to be tried here again when they are due."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on."""

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether a queue has waiting messages that are not blocked."""

    def next_at(self) -> float | None:
        """Return when the first blocked message continues, if there is one."""


class HandlerCall:
    """One call of a handler: some items and, once it is over, a result for each."""

    __slots__ = ("abandoned", "alone", "expired", "items", "lane", "results", "started_at", "subscribed")

    def __init__(self, subscribed: Subscribed, lane: Lane, items: list[FetchedEntry]) -> None:
        self.subscribed = subscribed
        self.lane = lane
        self.items = items
        # Taken from the lane with the others, but removed by retention before they could be loaded.
        self.expired: list[FetchedEntry] = []
        self.results: Sequence[Result] = ()
        # A quarantined message is handled, and nothing else runs here.
        self.alone = False
        self.started_at: float | None = None
        # Why the attempt no longer counts; set by the dispatching thread, read by the handler's.
        self.abandoned = ""

    def start(self) -> None:
        """Record that the handler is being called now."""
        self.started_at = time.monotonic()

    def fence_reason(self) -> str:
        """Return why effects of this attempt must not be stored, or '' (see outbox.utils.fence)."""
        if self.abandoned:
            return self.abandoned
        for queue in {id(item.queue): item.queue for item in self.items}.values():
            if not queue.trusted():
                return f"the lease of queue {queue.name} for group {queue.group.name!r} is over"
        return ""


# -- concurrent mode -------------------------------------------------------------------------------
#
# Concurrent mode: any message may be handled at any time.


class ConcurrentLane:
    """Hands out fetched messages in the order of arrival, and failed ones again when they are due."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._ready: deque[FetchedEntry] = deque()
        self._later: list[tuple[float, int, FetchedEntry]] = []
        self._numbers = itertools.count()

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        self._ready.extend(items)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; empty when there is none."""
        ready = self._ready
        while self._later and self._later[0][0] <= now:
            ready.append(heapq.heappop(self._later)[2])
        return take_run(ready, self._batch)

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End one `take`; the items in `again` are to be tried here again when they are due."""
        for item in again:
            heapq.heappush(self._later, (item.due, next(self._numbers), item))

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on."""

        def stays(item: FetchedEntry) -> bool:
            return item.queue is not queue or item.offset < from_offset

        self._ready = deque(filter(stays, self._ready))
        self._later = [entry for entry in self._later if stays(entry[2])]
        heapq.heapify(self._later)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether a queue has waiting messages that are not blocked."""
        return any(item.queue is queue for item in self._ready)

    def next_at(self) -> float | None:
        """Return when the first failed message kept here is due, if there is one."""
        return self._later[0][0] if self._later else None


# -- ordered modes ---------------------------------------------------------------------------------
#
# The two ordered modes: serial queues; one call at a time takes their first messages.
#
# In orderly mode a serial queue is a queue. In key-ordered mode it is a key within a queue. A key belongs to one queue,
# and a queue to one process. So the order holds across processes, as long as queues are handed over with nothing in
# flight.


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
