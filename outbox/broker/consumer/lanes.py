"""Fetched entries, and the lanes in which they wait until a call handles them. There is one kind of lane per mode.

A part may add a kind of its own with `hooks.add_lane`, a subclass of `RoundRobinLane`.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from outbox.broker.consumer.fetch import BODY, SECONDS_LEFT
from outbox.broker.consumer.owned_queue import OwnedQueue

_parts: Final = itertools.count(1)
_PART: Final = attrgetter("part")


class FetchedEntry:
    """One fetched entry.

    `key` is the key of the message, or the name by which the lane of a part orders it.

    `retries` counts how often the entry was sent back. `in_place` counts the failed attempts since this process fetched
    the entry.

    `row` is the fetched row (`fetch.Row`). `row` is None while the row is not in memory, because the body is large or
    the entry waits behind a blocked key (`shed`). The process loads such a row before the call. `part` is the number of
    a part of a divided batch, or 0. All entries of a call belong to the same part. `ends_at` is the end of the
    message's time limit (time.monotonic); None without a limit, or while this process does not know the limit.
    """

    __slots__ = ("due", "ends_at", "in_place", "key", "offset", "part", "queue", "retries", "row", "shed")

    def __init__(self, queue: OwnedQueue, offset: int, retries: int, key: str, row: tuple[Any, ...] | None) -> None:
        self.queue = queue
        self.offset = offset
        self.retries = retries
        self.key = key
        self.row = row
        self.in_place = 0
        self.shed = False
        self.part = 0
        self.ends_at: float | None = None
        # The time (time.monotonic) at which this process tries the entry again after a failed attempt.
        self.due = 0.0

    @property
    def attempt(self) -> int:
        """The number of the next or running attempt at this entry, from 1."""
        return self.retries + self.in_place + 1


def note_time_limits(items: Sequence[FetchedEntry]) -> None:
    """Set `ends_at` of the items whose message has a time limit.

    Call this right after the rows of these items were read. The time between the reading and this call prolongs the
    limit.
    """
    now = time.monotonic()
    for item in items:
        if item.row and (seconds_left := item.row[SECONDS_LEFT]) is not None:
            item.ends_at = now + seconds_left


def divide(items: Sequence[FetchedEntry], size: int) -> None:
    """Divide the entries into parts of at most `size` entries. Each later call takes entries of one part only."""
    for start in range(0, len(items), size):
        part = next(_parts)
        for item in items[start : start + size]:
            item.part = part


def take_run(waiting: deque[FetchedEntry], most: int) -> list[FetchedEntry]:
    """Remove and return the first items of `waiting`, at most `most`.

    Either all these items belong to the same part, or none of them belongs to a part.
    """
    run = [waiting.popleft() for _ in range(min(most, len(waiting)))]
    if len(set(map(_PART, run))) > 1:
        end = next(place for place, item in enumerate(run) if item.part != run[0].part)
        waiting.extendleft(reversed(run[end:]))
        del run[end:]
    return run


class Lane:
    """Keeps fetched messages and decides which of them may be handled next.

    `ready`: what may start a call now, unless an admission keeps it. `later`: the failed messages that are not due yet,
    or what they block, by the time (time.monotonic) at which they are due. If both are empty, `take` finds nothing.
    """

    def __init__(self) -> None:
        self.ready: deque[Any] = deque()
        self.later: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages of one queue, in queue order. A row without its large body is dropped afterwards."""
        raise NotImplementedError

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; an empty list if no message may be handled now."""
        raise NotImplementedError

    def wake(self, now: float) -> None:
        """Count the failed messages that are due now as waiting. `take` does so too."""
        raise NotImplementedError

    def end(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        A later `take` returns the items in `again` when they are due.
        """
        for item in again:
            self.postpone(item.due, item)

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Drop the waiting messages of a queue whose offset is `from_offset` or higher."""
        raise NotImplementedError

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages that are not blocked."""
        raise NotImplementedError

    def next_at(self) -> float | None:
        """Return the time at which the first blocked message is due; None if no message is blocked."""
        return self.later[0][0] if self.later else None

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return messages without rows that start soon after `item`. The caller loads them in the same statement."""
        return []

    @property
    def waiting(self) -> int:
        """The number of messages, or of serial queues, that an admission may keep from being handled now."""
        return len(self.ready)

    def startable(self, most: int) -> int:
        """Return how many calls could start now if they were admitted, at most `most`."""
        return min(most, self.waiting)

    # -- for subclasses -------------------------------------------------------------------------

    def postpone(self, due: float, what: object) -> None:
        """Let this wait until `due` (time.monotonic)."""
        heapq.heappush(self.later, (due, next(self._numbers), what))

    def due(self, now: float) -> Iterator[Any]:
        """Remove and yield what is due now."""
        while self.later and self.later[0][0] <= now:
            yield heapq.heappop(self.later)[2]

    def _keep(self, stays: Callable[[Any], bool]) -> None:
        """Drop the others of those that wait until they are due."""
        self.later = [entry for entry in self.later if stays(entry[2])]
        heapq.heapify(self.later)


def _before(queue: OwnedQueue, offset: int) -> Callable[[FetchedEntry], bool]:
    """Return whether a message stays in its lane if those of `queue` from `offset` on are dropped."""
    return lambda item: item.queue is not queue or item.offset < offset


class ConcurrentLane(Lane):
    """The lane of concurrent mode, in which any message may be handled at any time.

    It returns fetched messages in the order of their arrival, and failed messages again when they are due.
    """

    ready: deque[FetchedEntry]

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        self.ready.extend(items)

    def take(self, now: float) -> list[FetchedEntry]:
        if self.later:
            self.wake(now)
        if not self.ready:
            return []
        return [self.ready.popleft()] if self._batch == 1 else take_run(self.ready, self._batch)

    def wake(self, now: float) -> None:
        self.ready.extend(self.due(now))

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        stays = _before(queue, from_offset)
        self.ready = deque(filter(stays, self.ready))
        self._keep(stays)

    def has_ready(self, queue: OwnedQueue) -> bool:
        return any(item.queue is queue for item in self.ready)


class SerialQueue:
    """The messages of a queue or a key, which are handled one after the other."""

    __slots__ = ("busy", "items", "name", "suspended_until")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.items: deque[FetchedEntry] = deque()
        # Whether a call has messages of this serial queue, and until when a failed message blocks it.
        self.busy = False
        self.suspended_until: float | None = None


class OrderedLane(Lane):
    """The lane of the two ordered modes, in which messages wait in serial queues.

    In orderly mode, each queue is a serial queue. With `by_key`, each key within a queue is one, and so are the
    messages of the queue that have no key. Only one call at a time has messages of a serial queue, and a failing
    message blocks its serial queue only. A batch has messages of one queue in orderly mode, and with `by_key` messages
    of several keys, and several successive messages of each key.

    A key belongs to one queue, and one process owns a queue. A process hands a queue over only when no call with
    messages of that queue is running. So the messages also keep their order when their queue gets another owner.
    """

    ready: deque[SerialQueue]

    def __init__(self, batch: int, *, by_key: bool) -> None:
        super().__init__()
        self._batch = batch
        self._by_key = by_key
        self._serials: dict[Hashable, SerialQueue] = {}

    def _name(self, item: FetchedEntry) -> Hashable:
        # A queue that is lost and acquired again has a new object, and so other serial queues.
        return (id(item.queue), item.key) if self._by_key else id(item.queue)

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        for item in items:
            name = self._name(item)
            serial = self._serials.get(name)
            if serial is None:
                serial = self._serials[name] = SerialQueue(name)
            if not serial.items and not serial.busy and serial.suspended_until is None:
                self.ready.append(serial)
            serial.items.append(item)
            if serial.suspended_until is not None:
                self._shed(serial)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the first messages of the serial queues that have been ready for the longest time.

        If a batch was divided, the call has messages of only one part.
        """
        if self.later:
            self.wake(now)
        call: list[FetchedEntry] = []
        while self.ready and len(call) < self._batch:
            if call and not (self._by_key and self.ready[0].items[0].part == call[0].part):
                break
            serial = self.ready.popleft()
            serial.busy = True
            call += take_run(serial.items, self._batch - len(call))
        return call

    def wake(self, now: float) -> None:
        for serial in self.due(now):
            serial.suspended_until = None
            self.ready.append(serial)

    def end(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        The items in `again` go back to the front of their serial queues, and wait there until they are due.
        """
        returned: dict[Hashable, list[FetchedEntry]] = {}
        for item in again:
            returned.setdefault(self._name(item), []).append(item)
        for name in dict.fromkeys(map(self._name, items)):
            serial = self._serials.get(name)
            if serial is not None:
                self._end(serial, returned.get(name, []))

    def _end(self, serial: SerialQueue, again: Sequence[FetchedEntry]) -> None:
        serial.busy = False
        if again:
            at = max(item.due for item in again)
            serial.items.extendleft(reversed(again))
            serial.suspended_until = at
            self._shed(serial)
            self.postpone(at, serial)
        elif serial.items:
            self.ready.append(serial)
        else:
            del self._serials[serial.name]

    def _shed(self, serial: SerialQueue) -> None:
        """Keep only the first message of a blocked key in memory.

        The process loads each other message again before the call that handles it.
        """
        if not self._by_key:
            return
        for item in list(serial.items)[1:]:
            if not item.shed:
                item.row = None
                item.shed = True
                item.queue.buffered -= 1

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        for serial in list(self._serials.values()):
            if serial.items and serial.items[0].queue is queue:
                serial.items = deque(item for item in serial.items if item.offset < from_offset)
                if not serial.items and not serial.busy:
                    del self._serials[serial.name]
        self.ready = deque(serial for serial in self.ready if serial.items)
        self._keep(lambda serial: bool(serial.items))

    def has_ready(self, queue: OwnedQueue) -> bool:
        return any(serial.items[0].queue is queue for serial in self.ready)


# -- one name after the other ----------------------------------------------------------------------
#
# The base of the lanes of parts, in concurrent mode: it calls the handler for one name, such as a key, after the other.
# Each call has one message, of the name that has waited longest. A name may have far more messages than the others. So
# the lane keeps few rows in memory, the process fetches on, and finds the messages of other names behind those of a
# flood. It loads the rows of the other messages again before their calls.


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


class RoundRobinLane(Lane, Generic[Named]):
    """A lane whose calls have one message. `FetchedEntry.key` is the name of a message."""

    # The names of which a call may start; the name that has waited longest is the first one.
    ready: deque[Named]
    # The number of messages that may be handled now, if they are admitted.
    waiting: int = 0

    def __init__(self, make: Callable[[str], Named]) -> None:
        super().__init__()
        self._make = make
        self._names: dict[str, Named] = {}

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        following = len(items)
        for item in items:
            named = self.named(item.key)
            # One text for all messages of the name.
            item.key = named.name
            is_long = len(named.items) >= _ROWS_OF_NAME or item.queue.buffered - following >= _ROWS_OF_QUEUE
            following -= 1
            if is_long and len(self.ready) < _MOST_READY:
                # A large body is loaded for its own call only.
                if item.row and item.row[BODY] is not None:
                    named.shed.append(item)
                item.row = None
                item.shed = True
                item.queue.buffered -= 1
            named.items.append(item)
            self.waiting += 1
            self.schedule(named)

    def take(self, now: float) -> list[FetchedEntry]:
        self.wake(now)
        while self.ready:
            named = self.ready.popleft()
            named.is_ready = False
            if named.items:
                item = named.items.popleft()
                self.waiting -= 1
                self.schedule(named)
                self.shortened(named)
                return [item]
        return []

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        stays = _before(queue, from_offset)
        for named in list(self._names.values()):
            if not all(map(stays, named.items)):
                kept = deque(filter(stays, named.items))
                self.waiting -= len(named.items) - len(kept)
                named.items = kept
                named.shed = deque(filter(stays, named.shed))
                self.shortened(named)
        self._keep(stays)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages of which a call may start."""
        return any(item.queue is queue for named in self.ready for item in named.items)

    def wake(self, now: float) -> None:
        """Put the failed messages that are due now before the other messages of their names."""
        for item in self.due(now):
            named = self.named(item.key)
            named.items.appendleft(item)
            self.waiting += 1
            self.schedule(named)

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        found: list[FetchedEntry] = []
        own = self._names.get(item.key)
        of_each = max(1, _LOADED_AT_ONCE // (1 + len(self.ready)))
        for named in chain([] if own is None else [own], self.ready):
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
            self.ready.append(named)

    def shortened(self, named: Named) -> None:
        """Note that messages of a name have left the lane."""
        if not named.items:
            self._names.pop(named.name, None)
