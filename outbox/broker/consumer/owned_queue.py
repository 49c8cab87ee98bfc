"""The groups, subscriptions and queues of this process, and what its two threads tell each other about queues."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox import hooks
from outbox.broker.groups.leases import Lease, QueueKey, lease_clock
from outbox.broker.groups.offsets import OffsetRow, Position
from outbox.broker.groups.quarantine import QuarantinedMessage
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler
from outbox.subscription import Effects, Mode, Subscription

# -- groups and subscriptions ----------------------------------------------------------------------


_LEAST_FETCH: Final = 128
_MOST_FETCH: Final = 1000
# For a lane of a part, whose rows in memory would otherwise be the end of fetching (`room_of`).
_LANE_FETCH: Final = 512
# A process fetches an entry only if the entry's offset is less than the queue's lowest unfinished offset plus this
# number. After a crash, at most this many messages of a queue are delivered again.
_SPAN: Final = {Mode.CONCURRENT: 4_000, Mode.ORDERLY: 4_000, Mode.KEY_ORDERED: 50_000}


@dataclass
class ConsumingGroup:
    """A consumer group in this process.

    `subscribed` maps topic ids to the subscriptions of the group. `retry_queues` maps topic ids to the ids of the
    group's retry queues; a retry queue is missing while this process does not know its id.

    `paused`, `generation` (of the inbox) and `quarantined` (by log id) are copies of the values in the database. Only
    the coordinator changes them, and replaces each as a whole.
    """

    group_id: int
    name: str
    broadcast: bool
    retry_queues: dict[int, int] = field(default_factory=dict)
    subscribed: dict[int, Subscribed] = field(default_factory=dict)
    paused: bool = False
    generation: int = 1
    quarantined: Mapping[int, QuarantinedMessage] = field(default_factory=dict)

    def subscribe(self, subscription: Subscription, handler: AnyHandler, topic_id: int) -> Subscribed:
        """Add a subscription to this group, and return it."""
        subscribed = self.subscribed[topic_id] = Subscribed(self, subscription, handler, topic_id)
        return subscribed


class AdmissionLease:
    """Whether this process may rely on what the admission of a subscription has given it. Any thread may read it.

    `epoch` grows whenever other processes may have got what was given to this process. A call of an earlier epoch does
    not start, because another process may have what admitted it. See decision 209.
    """

    __slots__ = ("epoch", "trusted_until")

    def __init__(self) -> None:
        self.trusted_until = 0.0
        self.epoch = 0

    def trusted(self) -> bool:
        """Return whether a handler may be started now."""
        return lease_clock() < self.trusted_until

    def admits(self, epoch: int) -> bool:
        """Return whether the handler of a call may be started now. `epoch`: the epoch in which the call was admitted.

        Read the trust first: the dispatching thread raises the epoch before it trusts the lease again.
        """
        return self.trusted() and epoch == self.epoch


class Subscribed:
    """A subscription of this process: its handler, its filter, and the limits for fetching.

    `admission_lease` is None if no option of the subscription decides when its calls start.
    """

    def __init__(self, group: ConsumingGroup, subscription: Subscription, handler: AnyHandler, topic_id: int) -> None:
        # (group id, topic id)
        self.key: Final = (group.group_id, topic_id)
        self.group: Final = group
        self.subscription: Final = subscription
        self.handler: Final = handler
        self.filter: Final = parse_filter(subscription.filter)
        self.ordered: Final = subscription.mode is not Mode.CONCURRENT
        # The option that makes the bodies for the handler; None if the handler gets the decoded bodies.
        self.reader: Final = subscription.reader
        # Whether the handler runs without a transaction, for a message that the process has claimed.
        self.claims: Final = subscription.effects is Effects.OUTSIDE
        # The lane of a part keeps few rows in memory, and finds the messages of other names behind those of a flood, as
        # key-ordered mode does.
        has_lane = any(option.has_lane for option in subscription.options)
        least = _LANE_FETCH if has_lane else _LEAST_FETCH
        self.fetch_size: Final = min(_MOST_FETCH, max(least, 2 * subscription.batch))
        self.span: Final = _SPAN[Mode.KEY_ORDERED if has_lane else subscription.mode]
        is_admitted = any(type(option) in hooks.admissions for option in subscription.options)
        self.admission_lease: Final = AdmissionLease() if is_admitted else None
        self.waits_for_key: Final = any(option.waits_for_key for option in subscription.options)


# -- queues ----------------------------------------------------------------------------------------
#
# The state of a queue in the process that owns it: fetched entries, unfinished entries, and the outcomes of finished
# entries.


class EntryOutcome(enum.IntEnum):
    """The outcome of a finished entry. The table `consumer_offset` has a counter for each outcome."""

    HANDLED = 0
    FILTERED = 1
    SKIPPED = 2
    SENT_BACK = 3
    DEAD = 4
    EXPIRED = 5


class Phase(enum.Enum):
    """The phase of a queue in the process that owns it."""

    ACTIVE = "active"
    """The process fetches and handles the messages of the queue."""
    STOPPED = "stopped"
    """A handler with on_error=STOP has stopped the queue.

    The process keeps the lease, and starts no call for the queue until an operator resumes it.
    """
    DRAINING = "draining"
    """The process hands the queue over.

    The process finishes the messages in running calls and all messages before these messages. Then the process stores
    the offset and releases the lease.
    """
    LOST = "lost"
    """Another process may own the queue, so this process starts no call for the queue and stores nothing about it."""


class OffsetWindow:
    """The lowest unfinished offset of a queue, and the finished offsets above this offset.

    The process stores the lowest unfinished offset (`base`).
    """

    __slots__ = ("_finished", "_gaps", "base", "counts", "moved", "start_offset")

    def __init__(self, position: Position) -> None:
        self.base = position.next_offset
        self.start_offset = position.start_offset
        self.moved = position.moved
        # By `EntryOutcome`.
        self.counts: list[int] = [getattr(position, outcome.name.lower()) for outcome in EntryOutcome]
        self._finished: dict[int, EntryOutcome] = {}
        self._gaps: dict[int, int] = {}

    def finish(self, offset: int, outcome: EntryOutcome) -> None:
        """Mark `offset` as finished. The caller calls `advance` after one or several calls of `finish`."""
        self._finished[offset] = outcome

    def finish_all(self, offsets: Sequence[int], outcome: EntryOutcome) -> None:
        """Mark all these offsets as finished; each of them is given once. The caller calls `advance` afterwards."""
        first, end = min(offsets), max(offsets) + 1
        if first == self.base and end - first == len(offsets):
            # A call usually has all offsets from the lowest unfinished one on, so count them without a look at each.
            self.counts[outcome] += len(offsets)
            self.base = end
        else:
            self._finished.update(dict.fromkeys(offsets, outcome))

    def skip(self, start: int, end: int) -> None:
        """Mark the offsets from `start` to `end - 1` as removed by retention before this process fetched them."""
        self._gaps[start] = end

    @property
    def finished_end(self) -> int:
        """The highest finished offset, plus one."""
        return max(self._finished, default=self.base - 1) + 1

    def is_finished(self, offset: int) -> bool:
        """Return whether an offset at or above `base` is finished."""
        return offset in self._finished

    def advance(self) -> None:
        """Move `base` forward to the lowest unfinished offset."""
        base, finished, counts = self.base, self._finished, self.counts
        while True:
            outcome = finished.pop(base, None)
            if outcome is not None:
                counts[outcome] += 1
                base += 1
            elif base in self._gaps:
                end = self._gaps.pop(base)
                counts[EntryOutcome.EXPIRED] += end - base
                base = end
            else:
                break
        self.base = base

    def position(self) -> Position:
        """Return the position of the group on this queue, in the form to store."""
        handled, filtered, skipped, sent_back, dead, expired = self.counts
        return Position(self.base, self.start_offset, handled, filtered, skipped, sent_back, dead, expired, self.moved)


class OwnedQueue:
    """A queue that this process consumes for a group, under a lease.

    The coordinator's thread creates a queue and sends it to the dispatching thread with `Change.ACQUIRED`. Afterwards
    only the dispatching thread changes it. Any thread may call the methods marked "any thread" and read `phase` and
    `window.base`, because each of these values is replaced as a whole.
    """

    def __init__(
        self, lease: Lease, group: ConsumingGroup, subscribed: Subscribed | None, name: str, position: Position
    ) -> None:
        self.lease: Final = lease
        self.key: Final[QueueKey] = lease.key
        self.group: Final = group
        # None for a retry queue: each message of a retry queue goes to the subscription of the message's topic.
        self.subscribed: Final = subscribed
        self.name: Final = name
        self.window: Final = OffsetWindow(position)
        self.phase = Phase.ACTIVE
        # `fetch_from` is the next offset to fetch. `buffered` counts the entries in memory, `running` those in running
        # calls.
        self.fetch_from = position.next_offset
        self.buffered = 0
        self.running = 0
        # While the queue is draining, messages may still be started until this time (time.monotonic).
        self.start_until = 0.0
        # A bounded pass fetches only entries before this offset.
        self.end: int | None = None
        # The `finished_ahead` rows of messages before this offset are deleted already.
        self.swept_offset = 0
        self._refetched_below = 0
        self._ordinal = 0
        # The offset of this queue that is stored in the database.
        self.stored_offset = position.next_offset

    # -- any thread -----------------------------------------------------------------------------

    def trusted(self) -> bool:
        """Return whether this process may still rely on the lease. Any thread."""
        return lease_clock() < self.lease.trusted_until

    def may_start(self) -> bool:
        """Whether a handler may be started for a message of this queue. Any thread."""
        return self.phase in (Phase.ACTIVE, Phase.DRAINING) and self.trusted()

    # -- the dispatching thread -----------------------------------------------------------------

    def stop(self) -> None:
        """Stop the queue: start no call for the queue until an operator resumes it.

        The phase of a draining or lost queue does not change.
        """
        if self.phase is Phase.ACTIVE:
            self.phase = Phase.STOPPED

    def resume(self) -> None:
        """Continue after a stop: fetch again from the lowest unfinished entry on.

        Entries that are already finished are not handled again.
        """
        self.phase = Phase.ACTIVE
        self._refetched_below = max(self._refetched_below, self.fetch_from)
        self.fetch_from = self.window.base

    def skip_to(self, floor: int) -> None:
        """Skip all entries below `floor`, because retention has removed them."""
        if floor > self.fetch_from:
            self.window.skip(self.fetch_from, floor)
            self.window.advance()
            self.fetch_from = floor

    def sent_away_before(self, offsets: Mapping[int, bool]) -> None:
        """Mark messages as finished if a former owner finished them without storing its offset.

        `offsets` maps the offset of each such message to True if it became a dead letter, and to False if it was sent
        back.
        """
        ahead = {offset: is_dead for offset, is_dead in offsets.items() if offset >= self.fetch_from}
        for offset, is_dead in ahead.items():
            self.window.finish(offset, EntryOutcome.DEAD if is_dead else EntryOutcome.SENT_BACK)
        self._refetched_below = max(ahead, default=-1) + 1
        self.window.advance()
        self.fetch_from = max(self.fetch_from, self.window.base)

    @property
    def fetches_again(self) -> bool:
        """Whether the next entries may be finished already, by a former owner or by this process before a stop."""
        return self.fetch_from < self._refetched_below

    def returned(self) -> None:
        """Count an entry neither in running calls nor in memory any more. If it goes back to its lane, the caller
        raises `buffered` again."""
        self.running -= 1
        self.buffered -= 1

    def next_row(self) -> OffsetRow | None:
        """Return the row to store; None if the position has not moved since the last stored row."""
        if self.window.base == self.stored_offset:
            return None
        self._ordinal += 1
        return OffsetRow(self.key, self.lease.epoch, self._ordinal, self.window.position())


# -- ownership -------------------------------------------------------------------------------------
#
# The coordinator decides which queues this process owns, and tells the dispatching thread. The dispatching thread hands
# a queue back when its lease may be released.


class Change(enum.Enum):
    """What the coordinator tells the dispatching thread about a queue."""

    ACQUIRED = "acquired"
    """This process now owns the queue, and consumes the messages from the queue's position on."""
    HAND_OVER = "hand over"
    """Finish the running calls of this queue, store its offset, then call `Ownership.hand_back`."""
    LOST = "lost"
    """The lease is over: start no more handlers for its queue, and store nothing for this queue."""
    STOPPED = "stopped"
    """The queue was stopped in the database."""
    RESUMED = "resumed"
    """The queue was resumed in the database."""
    NEW_LIFE = "new life"
    """The coordinator has seen another life of the broker. It concerns all queues.

    The dispatching thread must read the life before it takes the next change.
    """


class Ownership:
    """All state that the coordinator's thread and the dispatching thread share.

    This state needs no locks, because each field is replaced as a whole or is a thread-safe container.
    """

    def __init__(self, wake_dispatcher: Callable[[], None]) -> None:
        self.wake_dispatcher: Final = wake_dispatcher
        self._coordinator_wanted = threading.Event()
        # The changes for the dispatching thread, oldest first, with their queues.
        self.changes: Final[deque[tuple[Change, OwnedQueue | None]]] = deque()
        # The leases to release, oldest first. The coordinator removes them after their release.
        self.handed_back: Final[deque[Lease]] = deque()
        # The queues that this process has lost while handlers that it had started before still run. If this process
        # acquired such a queue again now, it would handle the same messages twice at once.
        self.blocked: Final[dict[QueueKey, OwnedQueue]] = {}
        # Whether this process may acquire no more queues, because it hands its queues over to other instances.
        self.is_draining = False
        # Whether the process has to register again.
        self.is_outdated = False

    # -- the dispatching thread's side ----------------------------------------------------------

    def hand_back(self, lease: Lease) -> None:
        """Give the lease of a queue back to the coordinator, because the queue is drained or the lease is over."""
        self.handed_back.append(lease)
        self._coordinator_wanted.set()

    # -- the coordinator's side -----------------------------------------------------------------

    def emit(self, change: Change, queue: OwnedQueue | None) -> None:
        """Tell the dispatching thread about a change."""
        self.changes.append((change, queue))
        self.wake_dispatcher()

    def wait(self, seconds: float) -> None:
        """Wait until a queue is handed back or `wake_coordinator` is called, at most `seconds`."""
        self._coordinator_wanted.wait(seconds)
        self._coordinator_wanted.clear()

    def outdate(self) -> None:
        """Acquire no more queues until this process has registered again.

        The ids of this process's groups and topics may belong to other groups and topics now.
        """
        self.is_outdated = self.is_draining = True
        self.wake_dispatcher()

    # -- any thread -----------------------------------------------------------------------------

    def wake_coordinator(self) -> None:
        """Wake the coordinator now, because its groups or queues may have changed."""
        self._coordinator_wanted.set()
