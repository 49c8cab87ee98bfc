"""Fetched entries, and the lanes in which they wait until a call handles them. There is one kind of lane per mode.

A part may have a kind of its own:

    class ByTag(RoundRobinLane[NamedQueue]):
        def __init__(self, option: ByTagOption) -> None:
            super().__init__(NamedQueue)
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar

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


class Lane(Protocol):
    """A lane keeps fetched messages and decides which of them may be handled next.

    If `ready` and `later` are empty, `take` finds nothing.
    """

    @property
    def ready(self) -> Sized:
        """What may start a call now, unless an admission keeps it."""

    @property
    def later(self) -> Sized:
        """The failed messages that are not due yet, or what they block."""

    @property
    def waiting(self) -> int:
        """The number of messages, or of serial queues, that an admission may keep from being handled now."""

    def startable(self, most: int) -> int:
        """Return how many calls could start now if they were admitted, at most `most`."""

    def wake(self, now: float) -> None:
        """Count the failed messages that are due now as waiting. `take` does so too."""

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages of one queue, in queue order. A row without its large body is dropped afterwards."""

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; an empty list if no message may be handled now."""

    def end(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        A later `take` returns the items in `again` when they are due.
        """

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Drop the waiting messages of a queue whose offset is `from_offset` or higher."""

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages that are not blocked."""

    def next_at(self) -> float | None:
        """Return the time at which the first blocked message is due; None if no message is blocked."""

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return messages without rows that start soon after `item`. The caller loads them in the same statement."""


What = TypeVar("What")


class _Waiting(Generic[What]):
    """What lanes have in common: failed messages, or what they block, wait until they are due."""

    def __init__(self) -> None:
        self.later: list[tuple[float, int, What]] = []
        self._numbers = itertools.count()

    def postpone(self, due: float, what: What) -> None:
        """Let this wait until `due` (time.monotonic)."""
        heapq.heappush(self.later, (due, next(self._numbers), what))

    def due(self, now: float) -> Iterator[What]:
        """Remove and yield what is due now."""
        while self.later and self.later[0][0] <= now:
            yield heapq.heappop(self.later)[2]

    def next_at(self) -> float | None:
        """Return the time at which the first of them is due; None if none waits."""
        return self.later[0][0] if self.later else None

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return nothing: each message without its row is loaded when its turn comes."""
        return []

    def _keep(self, stays: Callable[[What], bool]) -> None:
        """Drop the others of those that wait."""
        self.later = [entry for entry in self.later if stays(entry[2])]
        heapq.heapify(self.later)


# -- concurrent mode -------------------------------------------------------------------------------
#
# In concurrent mode, any message may be handled at any time.


class _WaitingMessages(_Waiting[FetchedEntry]):
    """What the lanes of this mode have in common: a failed message waits alone, and blocks no other."""

    def end(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        A later `take` returns the items in `again` when they are due.
        """
        for item in again:
            self.postpone(item.due, item)


def _before(queue: OwnedQueue, offset: int) -> Callable[[FetchedEntry], bool]:
    """Return whether a message stays in its lane if those of `queue` from `offset` on are dropped."""
    return lambda item: item.queue is not queue or item.offset < offset


class ConcurrentLane(_WaitingMessages):
    """Returns fetched messages in the order of their arrival, and failed messages again when they are due."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self.ready: deque[FetchedEntry] = deque()

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        self.ready.extend(items)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; an empty list if no message may be handled now."""
        if self.later:
            self.wake(now)
        if not self.ready:
            return []
        return [self.ready.popleft()] if self._batch == 1 else take_run(self.ready, self._batch)

    def wake(self, now: float) -> None:
        """Count the failed messages that are due now as waiting."""
        self.ready.extend(self.due(now))

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Drop the waiting messages of a queue whose offset is `from_offset` or higher."""
        stays = _before(queue, from_offset)
        self.ready = deque(filter(stays, self.ready))
        self._keep(stays)

    @property
    def waiting(self) -> int:
        """The number of messages that may be handled now."""
        return len(self.ready)

    def startable(self, most: int) -> int:
        """Return how many messages may be handled now, at most `most`."""
        return min(most, len(self.ready))

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages that are not blocked."""
        return any(item.queue is queue for item in self.ready)


# -- ordered modes ---------------------------------------------------------------------------------
#
# In the two ordered modes, messages wait in serial queues. Only one call at a time has messages of a serial queue.
#
# In orderly mode, each queue is a serial queue. In key-ordered mode, each key within a queue is a serial queue. A key
# belongs to one queue, and one process owns a queue. A process hands a queue over only when no call with messages of
# that queue is running. So the messages also keep their order when their queue gets another owner.


class SerialQueue:
    """The messages of a queue or a key, which are handled one after the other."""

    __slots__ = ("busy", "items", "name", "suspended_until")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.items: deque[FetchedEntry] = deque()
        self.busy = False
        self.suspended_until: float | None = None

    @property
    def idle(self) -> bool:
        """Whether no call has messages of this serial queue, and no failed message blocks this serial queue."""
        return not self.busy and self.suspended_until is None


class OrderedLane(_Waiting[SerialQueue]):
    """A lane that puts each message into a serial queue.

    The subclasses of this class define the serial queue of a message, and which messages one call takes.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._serials: dict[Hashable, SerialQueue] = {}
        self.ready: deque[SerialQueue] = deque()

    def serial_name(self, item: FetchedEntry) -> Hashable:
        """Return the name of a message's serial queue. Only one call at a time handles messages of one serial queue."""
        raise NotImplementedError

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        for item in items:
            name = self.serial_name(item)
            serial = self._serials.get(name)
            if serial is None:
                serial = self._serials[name] = SerialQueue(name)
            if not serial.items and serial.idle:
                self.ready.append(serial)
            serial.items.append(item)
            if serial.suspended_until is not None:
                self.shed(serial)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; an empty list if no message may be handled now."""
        self.wake(now)
        return self.fill() if self.ready else []

    def fill(self) -> list[FetchedEntry]:
        """Return the messages of one call. The caller makes sure that at least one serial queue is ready."""
        raise NotImplementedError

    def end(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        The items in `again` go back to the front of their serial queues, and wait there until they are due.
        """
        returned: dict[Hashable, list[FetchedEntry]] = {}
        for item in again:
            returned.setdefault(self.serial_name(item), []).append(item)
        for name in dict.fromkeys(map(self.serial_name, items)):
            serial = self._serials.get(name)
            if serial is not None:
                self._end(serial, returned.get(name, []))

    def _end(self, serial: SerialQueue, again: Sequence[FetchedEntry]) -> None:
        serial.busy = False
        if again:
            at = max(item.due for item in again)
            serial.items.extendleft(reversed(again))
            serial.suspended_until = at
            self.shed(serial)
            self.postpone(at, serial)
        elif serial.items:
            self.ready.append(serial)
        else:
            del self._serials[serial.name]

    def shed(self, serial: SerialQueue) -> None:
        """Remove the rows of waiting messages from memory, because their serial queue is blocked."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Drop the waiting messages of a queue from `from_offset` on, and the serial queues that are then empty."""
        for serial in list(self._serials.values()):
            if serial.items and serial.items[0].queue is queue:
                serial.items = deque(item for item in serial.items if item.offset < from_offset)
                if not serial.items and not serial.busy:
                    del self._serials[serial.name]
        self.ready = deque(serial for serial in self.ready if serial.items)
        self._keep(lambda serial: bool(serial.items))

    @property
    def waiting(self) -> int:
        """The number of serial queues whose next message may be handled now."""
        return len(self.ready)

    def startable(self, most: int) -> int:
        """Return how many serial queues have a message that may be handled now, at most `most`."""
        return min(most, len(self.ready))

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages that are not blocked."""
        return any(serial.items[0].queue is queue for serial in self.ready)

    def wake(self, now: float) -> None:
        """Let the blocked serial queues continue whose failed message is due now."""
        for serial in self.due(now):
            serial.suspended_until = None
            self.ready.append(serial)


class OrderlyLane(OrderedLane):
    """The lane of orderly mode: it returns the messages of a queue in order, and to only one call at a time.

    A failing message blocks its queue.

    A batch has messages of one queue only.
    """

    def serial_name(self, item: FetchedEntry) -> Hashable:
        """Return the identity of the queue object. A queue that is lost and acquired again has a new object."""
        return id(item.queue)

    def fill(self) -> list[FetchedEntry]:
        """Return the first messages of the queue that has been ready for the longest time."""
        serial = self.ready.popleft()
        serial.busy = True
        return take_run(serial.items, self._batch)


class KeyOrderedLane(OrderedLane):
    """The lane of key-ordered mode: it returns the messages of a key in order, and to only one call at a time.

    A failing message blocks only its key.

    The messages of a queue that have no key form one serial queue. A batch may have messages of several keys, and
    several successive messages of each key.
    """

    def serial_name(self, item: FetchedEntry) -> Hashable:
        """Return the identity of the queue object and the key.

        A queue that is lost and acquired again has a new object.
        """
        return (id(item.queue), item.key)

    def fill(self) -> list[FetchedEntry]:
        """Return the first messages of each ready key, until the call has `batch` messages.

        If a batch was divided, the call has messages of only one part.
        """
        call: list[FetchedEntry] = []
        part = self.ready[0].items[0].part
        while self.ready and len(call) < self._batch and self.ready[0].items[0].part == part:
            serial = self.ready.popleft()
            serial.busy = True
            call += take_run(serial.items, self._batch - len(call))
        return call

    def shed(self, serial: SerialQueue) -> None:
        """Keep only the first message of a blocked serial queue in memory.

        The process loads each other message again before the call that handles it.
        """
        for item in list(serial.items)[1:]:
            if not item.shed:
                item.row = None
                item.shed = True
                item.queue.buffered -= 1


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


class RoundRobinLane(_WaitingMessages, Generic[Named]):
    """A lane whose calls have one message. `FetchedEntry.key` is the name of a message."""

    def __init__(self, make: Callable[[str], Named]) -> None:
        super().__init__()
        self._make = make
        self._names: dict[str, Named] = {}
        # The names of which a call may start; the name that has waited longest is the first one.
        self.ready: deque[Named] = deque()
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
        """Return the message of the next call; an empty list if no message may be handled now."""
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
        """Drop the waiting messages of a queue whose offset is `from_offset` or higher."""
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

    def startable(self, most: int) -> int:
        """Return how many messages may be handled now, at most `most`."""
        return min(most, self.waiting)

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return messages without rows that start soon after `item`. The caller loads them in the same statement."""
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
