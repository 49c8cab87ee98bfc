"""The data that the dispatching thread uses: fetched entries, lanes and calls.

Fetched entries wait in a lane until a call handles them. There is one kind of lane per mode.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Protocol

from outbox.broker.consumer.fetch import SECONDS_LEFT
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase, Subscribed
from outbox.broker.groups.redelivery import Redelivery
from outbox.ports import ClaimedElsewhere, Disposition

NOT_STARTED = None
"""The result of a delivery whose handler was not called, because its queue was lost or is being handed over."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The result of a delivery whose handler must wait until the time `until` (time.monotonic)."""

    until: float


class TimedOut(Exception):
    """The result of a delivery whose handler was not called, because the time limit of the message was over."""


Result = Disposition | BaseException | Postponed | ClaimedElsewhere | None

# A claimed message leaves its queue if its handler runs for longer than this (seconds). A shorter call needs no
# redelivery.
LEAVE_SECONDS: Final = 1.0

_QUEUE: Final = attrgetter("queue")

_parts: Final = itertools.count(1)


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


def counted_by_queue(items: Sequence[FetchedEntry]) -> Mapping[OwnedQueue, int]:
    """Return how many of the entries belong to each queue."""
    return {items[0].queue: 1} if len(items) == 1 else Counter(map(_QUEUE, items))


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
    if not waiting:
        return []
    part = waiting[0].part
    run: list[FetchedEntry] = []
    while waiting and len(run) < most and waiting[0].part == part:
        run.append(waiting.popleft())
    return run


class Lane(Protocol):
    """A lane keeps fetched messages and decides which of them may be handled next."""

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

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
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


class HandlerCall:
    """One call of a handler: its items and, after the call, a result for each item."""

    __slots__ = (
        "abandoned",
        "admission_epoch",
        "alone",
        "claimed_at",
        "expired",
        "given_back",
        "has_left",
        "items",
        "lane",
        "may_share",
        "note",
        "redelivery",
        "renew_at",
        "results",
        "returned_at",
        "shares",
        "started_at",
        "subscribed",
        "term_seconds",
    )

    def __init__(self, subscribed: Subscribed, lane: Lane, items: list[FetchedEntry]) -> None:
        self.subscribed = subscribed
        self.lane = lane
        self.items = items
        # The epoch in which this call was admitted (AdmissionLease).
        self.admission_epoch = 0 if subscribed.admission_lease is None else subscribed.admission_lease.epoch
        # Items of this call that retention removed before the process could load them.
        self.expired: list[FetchedEntry] = []
        self.results: Sequence[Result] = ()
        # Whether this call handles a quarantined message while this process runs no other call.
        self.alone = False
        self.started_at: float | None = None
        # The reason why the attempt no longer counts; '' while the attempt counts. The dispatching thread sets this
        # text, and the handler's thread reads it.
        self.abandoned = ""
        # The time (time.time) at which the handler returned, if another call then joined its transaction; else None.
        self.returned_at: float | None = None
        # The place of this call's note about the running handler (RunningCalls); None without a note.
        self.note: int | None = None
        # Whether this call may share a transaction with other calls of its subscription.
        self.may_share = False
        # All calls of the shared transaction, this one included; empty if this call runs alone.
        self.shares: Sequence[HandlerCall] = ()
        # Whether this call was ended because another call of its shared transaction timed out. Its late result is
        # ignored.
        self.given_back = False
        # The time (time.monotonic) at which the message of this call was claimed, and the term of the claim. The
        # handler's thread sets the time last.
        self.claimed_at: float | None = None
        self.term_seconds = 0.0
        # Whether the queue does not wait for this call any more: the claimed message has left its queue, or it is
        # detached from its queue. `redelivery`: the row that delivers the message again. It is None if the message is
        # detached: then the next owner of the queue delivers the message again.
        self.has_left = False
        self.redelivery: Redelivery | None = None
        # The time (time.monotonic) at which to move the due time of that row.
        self.renew_at = 0.0

    def claimed(self, term_seconds: float) -> None:
        """Record that the message of this call is claimed. The handler's thread calls this method."""
        self.term_seconds = term_seconds
        self.claimed_at = time.monotonic()

    @property
    def keeps_order(self) -> bool:
        """Whether the messages of this call block the later messages of their keys.

        A message of the retry queue has given up its order, and blocks no message.
        """
        return self.subscribed.ordered and any(item.queue.subscribed is not None for item in self.items)

    def leaves_at(self) -> float | None:
        """Return when the queue stops waiting for the claimed message (time.monotonic).

        In concurrent mode, the message leaves its queue. In ordered modes, the message blocks the later messages of its
        key, so it stays in its queue as long as this process owns the queue; it is detached when the queue is handed
        over or lost. Return None if the message has left, or stays.
        """
        if self.claimed_at is None or self.has_left:
            return None
        phases = {item.queue.phase for item in self.items}
        if self.keeps_order:
            return self.claimed_at if phases & {Phase.DRAINING, Phase.LOST} else None
        return self.claimed_at + (LEAVE_SECONDS if phases == {Phase.ACTIVE} else 0.0)

    @property
    def blocks_until_returned(self) -> bool:
        """Whether the handler of this abandoned call still runs, and its key or queue must wait for it."""
        by_key = self.subscribed.ordered or self.subscribed.waits_for_key
        return bool(self.abandoned) and not self.given_back and by_key

    @property
    def is_given_up(self) -> bool:
        """Whether the thread of this call was replaced: this call, or a call that shares its transaction, hangs."""
        return bool(self.abandoned) or (len(self.shares) > 1 and any(call.abandoned for call in self.shares))

    def start(self) -> None:
        """Record that the handler is being called now."""
        self.started_at = time.monotonic()

    def fence_reason(self) -> str:
        """Return why the effects of this attempt must not be stored (outbox.utils.fence); '' if they may be stored."""
        if self.abandoned or self.claimed_at is not None:
            # The token of a claim protects the effects of a claimed message, whether the queue is lost or not.
            return self.abandoned
        for queue in counted_by_queue(self.items):
            if not queue.trusted():
                return f"the lease of queue {queue.name} for group {queue.group.name!r} is over"
        return ""


# -- concurrent mode -------------------------------------------------------------------------------
#
# In concurrent mode, any message may be handled at any time.


class ConcurrentLane:
    """Returns fetched messages in the order of their arrival, and failed messages again when they are due."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._ready: deque[FetchedEntry] = deque()
        self._later: list[tuple[float, int, FetchedEntry]] = []
        self._numbers = itertools.count()

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        self._ready.extend(items)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; an empty list if no message may be handled now."""
        if self._later:
            self.wake(now)
        return take_run(self._ready, self._batch) if self._ready else []

    def wake(self, now: float) -> None:
        """Count the failed messages that are due now as waiting."""
        while self._later and self._later[0][0] <= now:
            self._ready.append(heapq.heappop(self._later)[2])

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

        self._ready = deque(filter(stays, self._ready))
        self._later = [entry for entry in self._later if stays(entry[2])]
        heapq.heapify(self._later)

    @property
    def waiting(self) -> int:
        """The number of messages that may be handled now."""
        return len(self._ready)

    def startable(self, most: int) -> int:
        """Return how many messages may be handled now, at most `most`."""
        return min(most, len(self._ready))

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages that are not blocked."""
        return any(item.queue is queue for item in self._ready)

    def next_at(self) -> float | None:
        """Return the time at which the first failed message of this lane is due; None if no failed message waits."""
        return self._later[0][0] if self._later else None

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return nothing: each large body is loaded for its own call."""
        return []


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


class OrderedLane:
    """A lane that puts each message into a serial queue.

    The subclasses of this class define the serial queue of a message, and which messages one call takes.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._serials: dict[Hashable, SerialQueue] = {}
        self._ready: deque[SerialQueue] = deque()
        self._later: list[tuple[float, int, SerialQueue]] = []
        self._numbers = itertools.count()

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
                self._ready.append(serial)
            serial.items.append(item)
            if serial.suspended_until is not None:
                self.shed(serial)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; an empty list if no message may be handled now."""
        self.wake(now)
        return self.fill() if self._ready else []

    def fill(self) -> list[FetchedEntry]:
        """Return the messages of one call. The caller makes sure that at least one serial queue is ready."""
        raise NotImplementedError

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        The items in `again` go back to the front of their serial queues, and wait there until they are due.
        """
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
        """Remove the rows of waiting messages from memory, because their serial queue is blocked."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Drop the waiting messages of a queue from `from_offset` on, and the serial queues that are then empty."""
        for serial in list(self._serials.values()):
            if serial.items and serial.items[0].queue is queue:
                serial.items = deque(item for item in serial.items if item.offset < from_offset)
                if not serial.items and not serial.busy:
                    del self._serials[serial.name]
        self._ready = deque(serial for serial in self._ready if serial.items)
        self._later = [entry for entry in self._later if entry[2].items]
        heapq.heapify(self._later)

    @property
    def waiting(self) -> int:
        """The number of serial queues whose next message may be handled now."""
        return len(self._ready)

    def startable(self, most: int) -> int:
        """Return how many serial queues have a message that may be handled now, at most `most`."""
        return min(most, len(self._ready))

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Return whether a queue has waiting messages that are not blocked."""
        return any(serial.items[0].queue is queue for serial in self._ready)

    def next_at(self) -> float | None:
        """Return the time at which the first blocked serial queue continues; None if no serial queue is blocked."""
        return self._later[0][0] if self._later else None

    def next_shed(self, item: FetchedEntry) -> list[FetchedEntry]:
        """Return nothing: the messages behind a blocked one are loaded when their turn comes."""
        return []

    def wake(self, now: float) -> None:
        """Let the blocked serial queues continue whose failed message is due now."""
        while self._later and self._later[0][0] <= now:
            serial = heapq.heappop(self._later)[2]
            serial.suspended_until = None
            self._ready.append(serial)


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
        serial = self._ready.popleft()
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
        part = self._ready[0].items[0].part
        while self._ready and len(call) < self._batch and self._ready[0].items[0].part == part:
            serial = self._ready.popleft()
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
                item.queue.unbuffer()
