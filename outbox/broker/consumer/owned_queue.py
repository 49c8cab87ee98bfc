"""What this process owns: its groups and subscriptions, their queues, and the messages about ownership."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.offsets import OffsetRow, Position
from outbox.broker.groups.quarantine import QuarantinedMessage
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler
from outbox.subscription import Mode, Subscription

# -- groups and subscriptions ----------------------------------------------------------------------


_LEAST_FETCH: Final = 128
_MOST_FETCH: Final = 1000
# How far a queue is consumed beyond its lowest unfinished message: the most that is redelivered after a crash.
_SPAN: Final = {Mode.CONCURRENT: 4_000, Mode.ORDERLY: 4_000, Mode.KEY_ORDERED: 50_000}


@dataclass
class ConsumingGroup:
    """A consumer group in this process. `subscribed` is by topic id, and includes known retry queues.

    `paused`, `generation` (of the inbox) and `quarantined` (by log id) follow the database. The dispatching thread
    changes them.
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
        """Consume a topic for this group."""
        subscribed = self.subscribed[topic_id] = Subscribed(self, subscription, handler, topic_id)
        return subscribed


class Subscribed:
    """A subscription of this process: its handler, its filter, and how much of a queue to fetch for it."""

    __slots__ = ("fetch_size", "filter", "group", "handler", "key", "ordered", "span", "subscription")

    def __init__(self, group: ConsumingGroup, subscription: Subscription, handler: AnyHandler, topic_id: int) -> None:
        # (group id, topic id)
        self.key: Final = (group.group_id, topic_id)
        self.group: Final = group
        self.subscription: Final = subscription
        self.handler: Final = handler
        self.filter: Final = parse_filter(subscription.filter)
        self.ordered: Final = subscription.mode is not Mode.CONCURRENT
        self.fetch_size: Final = min(_MOST_FETCH, max(_LEAST_FETCH, 2 * subscription.batch))
        self.span: Final = _SPAN[subscription.mode]


# -- queues ----------------------------------------------------------------------------------------
#
# A queue as its present owner sees it: fetched entries, unfinished entries, and outcomes of the rest.


class EntryOutcome(enum.IntEnum):
    """The outcome of a finished entry; the counters of `consumer_offset`."""

    HANDLED = 0
    FILTERED = 1
    SKIPPED = 2
    SENT_BACK = 3
    DEAD = 4
    EXPIRED = 5


class Phase(enum.Enum):
    """The phase of a queue in the process that owns it."""

    ACTIVE = "active"
    """Fetch and handle."""
    STOPPED = "stopped"
    """A handler with on_error=STOP stopped it: keep the lease, start nothing until an operator resumes it."""
    DRAINING = "draining"
    """The queue is being handed over: fetch nothing, finish running and earlier messages, store the offset, release."""
    LOST = "lost"
    """Another owner may have it: start nothing, record nothing."""


class OffsetWindow:
    """The finished offsets from the lowest unfinished one on. That lowest one is the stored offset."""

    __slots__ = ("_finished", "_gaps", "base", "counts", "moved", "start_offset")

    def __init__(self, position: Position) -> None:
        self.base = position.next_offset
        self.start_offset = position.start_offset
        self.moved = position.moved
        self.counts = [
            position.handled,
            position.filtered,
            position.skipped,
            position.sent_back,
            position.dead,
            position.expired,
        ]
        self._finished: dict[int, EntryOutcome] = {}
        self._gaps: dict[int, int] = {}

    def finish(self, offset: int, outcome: EntryOutcome) -> None:
        """Mark `offset` as finished. Call `advance` after several of these calls."""
        self._finished[offset] = outcome

    def skip(self, start: int, end: int) -> None:
        """Mark offsets `start` to before `end` as removed by retention before they were fetched."""
        self._gaps[start] = end

    @property
    def finished_end(self) -> int:
        """The offset after the highest finished one."""
        return max(self._finished, default=self.base - 1) + 1

    def is_finished(self, offset: int) -> bool:
        """Whether an offset at or above the base is finished."""
        return offset in self._finished

    def advance(self) -> None:
        """Move the base past all finished offsets without a gap."""
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
        """Return the position to store."""
        handled, filtered, skipped, sent_back, dead, expired = self.counts
        return Position(self.base, self.start_offset, handled, filtered, skipped, sent_back, dead, expired, self.moved)


class OwnedQueue:
    """A queue that this process consumes for a group, under a lease.

    The coordinator's thread creates it and passes it on with `QueueAcquired`. From then on only the dispatching thread
    calls its methods, except those marked "any thread", which read single values that are written whole. Other code
    reads its fields, and changes them only by these methods.
    """

    __slots__ = (
        "_ordinal",
        "_refetched_below",
        "_stored_base",
        "buffered",
        "end",
        "fetch_from",
        "group",
        "hungry",
        "key",
        "lease",
        "name",
        "phase",
        "running",
        "start_until",
        "subscribed",
        "swept_offset",
        "window",
    )

    def __init__(
        self, lease: Lease, group: ConsumingGroup, subscribed: Subscribed | None, name: str, position: Position
    ) -> None:
        self.lease: Final = lease
        self.key: Final[QueueKey] = lease.key
        self.group: Final = group
        # None for a retry queue: each of its messages goes to the subscription of its own topic.
        self.subscribed: Final = subscribed
        self.name: Final = name
        self.window: Final = OffsetWindow(position)
        self.phase = Phase.ACTIVE
        # The next offset to fetch; whether there may be more; entries in memory; those of them in running calls.
        self.fetch_from = position.next_offset
        self.hungry = True
        self.buffered = 0
        self.running = 0
        # While it is drained: the time until which messages may still be started.
        self.start_until = 0.0
        # A bounded pass fetches up to here.
        self.end: int | None = None
        # Notes of messages sent away before this offset are removed.
        self.swept_offset = 0
        self._refetched_below = 0
        self._ordinal = 0
        self._stored_base = position.next_offset

    # -- any thread -----------------------------------------------------------------------------

    def trusted(self) -> bool:
        """Whether the lease may be acted on. Any thread."""
        return self.lease.trusted()

    def may_start(self) -> bool:
        """Whether a handler may be started for a message of this queue. Any thread."""
        return self.phase in (Phase.ACTIVE, Phase.DRAINING) and self.trusted()

    @property
    def is_stopped(self) -> bool:
        """Whether a handler with on_error=STOP stopped it. Any thread."""
        return self.phase is Phase.STOPPED

    @property
    def stored_offset(self) -> int:
        """The offset as it is stored."""
        return self._stored_base

    @property
    def next_offset(self) -> int:
        """The lowest unfinished offset. Any thread."""
        return self.window.base

    def swept(self) -> None:
        """Record that the notes of messages sent away before the stored offset are removed."""
        self.swept_offset = self._stored_base

    # -- phases ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Start nothing until it is resumed; a drained or lost queue keeps its phase."""
        if self.phase is Phase.ACTIVE:
            self.phase = Phase.STOPPED

    def resume(self) -> None:
        """Continue after a stop: fetch again from the lowest unfinished entry; later finished entries stay finished."""
        self.phase = Phase.ACTIVE
        self._refetched_below = max(self._refetched_below, self.fetch_from)
        self.fetch_from = self.window.base
        self.hungry = True

    def drain(self, *, start_until: float) -> None:
        """Fetch nothing more; messages before started ones may be started until `start_until` (time.monotonic)."""
        self.phase = Phase.DRAINING
        self.start_until = start_until

    def lose(self) -> None:
        """Another owner may have it."""
        self.phase = Phase.LOST

    # -- fetching -------------------------------------------------------------------------------

    def grown(self) -> None:
        """There may be more to fetch."""
        self.hungry = True

    def bound(self, end: int) -> None:
        """Fetch only entries before `end`."""
        self.end = end

    def skip_to(self, floor: int) -> None:
        """Skip everything below `floor`, which retention has removed."""
        if floor > self.fetch_from:
            self.window.skip(self.fetch_from, floor)
            self.window.advance()
            self.fetch_from = floor

    def sent_away_before(self, offsets: Mapping[int, bool]) -> None:
        """Take the notes about messages that a former owner sent away without storing its offset.

        The value says whether a message became a dead letter.
        """
        ahead = {offset: is_dead for offset, is_dead in offsets.items() if offset >= self.fetch_from}
        for offset, is_dead in ahead.items():
            self.window.finish(offset, EntryOutcome.DEAD if is_dead else EntryOutcome.SENT_BACK)
        self._refetched_below = max(ahead, default=-1) + 1
        self.window.advance()
        self.fetch_from = max(self.fetch_from, self.window.base)

    @property
    def fetches_again(self) -> bool:
        """Whether the next entries to fetch may be finished: fetched before a stop, or by a former owner."""
        return self.fetch_from < self._refetched_below

    def fetched(self, next_offset: int, *, more: bool) -> None:
        """Record that everything before `next_offset` was fetched; `more` if there may be more."""
        self.fetch_from = next_offset
        self.hungry = more

    def rest(self) -> None:
        """Fetch nothing until it has grown."""
        self.hungry = False

    # -- what is in memory and what runs ----------------------------------------------------------

    def buffer(self, count: int = 1) -> None:
        """Count entries that are now in memory."""
        self.buffered += count

    def unbuffer(self, count: int = 1) -> None:
        """Count entries that left memory without a call."""
        self.buffered -= count

    def unbuffer_waiting(self) -> None:
        """Count only the running entries as in memory."""
        self.buffered = self.running

    def started(self) -> None:
        """Count one more entry in a running call."""
        self.running += 1

    def returned(self, count: int) -> None:
        """Count entries that came back from a call; those that stay here are buffered again."""
        self.running -= count
        self.buffered -= count

    # -- offsets --------------------------------------------------------------------------------

    def next_row(self) -> OffsetRow | None:
        """Return the row to store if the position has moved since the last one."""
        if self.window.base == self._stored_base:
            return None
        self._ordinal += 1
        return OffsetRow(self.key, self.lease.epoch, self._ordinal, self.window.position())

    def stored(self, row: OffsetRow) -> None:
        """Record that a row was stored."""
        self._stored_base = row.position.next_offset


# -- ownership -------------------------------------------------------------------------------------
#
# Messages between the coordinator's thread and the dispatching thread about owned queues.
#
# The coordinator decides which queues to own, and sends events. The dispatching thread says when a queue may be
# released.


@dataclass(frozen=True)
class QueueAcquired:
    """A queue to consume from its position on."""

    queue: OwnedQueue


@dataclass(frozen=True)
class QueueHandOver:
    """Finish the running calls of this queue, store its offset, then call `Ownership.hand_back`."""

    lease: Lease


@dataclass(frozen=True)
class QueueLost:
    """The lease is over: start and record nothing of it any more."""

    lease: Lease


@dataclass(frozen=True)
class GroupChanged:
    """A group was paused or resumed, or has another inbox generation or other messages in quarantine."""

    group_id: int
    paused: bool
    generation: int
    quarantined: Mapping[int, QuarantinedMessage]


@dataclass(frozen=True)
class QueueStopped:
    """A queue is stopped, or was resumed."""

    key: QueueKey
    stopped: bool


@dataclass(frozen=True)
class LifeChanged:
    """The coordinator has seen another life of the broker: ask for the life before handling anything else."""


Event = QueueAcquired | QueueHandOver | QueueLost | GroupChanged | QueueStopped | LifeChanged


class Ownership:
    """All state that both threads use. No locks: each field is written whole or is a thread-safe container.

    `wake_dispatcher` is called after each event.
    """

    def __init__(self, wake_dispatcher: Callable[[], None]) -> None:
        self._wake_dispatcher = wake_dispatcher
        self._coordinator_wanted = threading.Event()
        self._events: deque[Event] = deque()
        self._handed_back: deque[Lease] = deque()
        self._blocked: set[QueueKey] = set()
        self._draining = False
        self._is_outdated = False

    # -- the dispatching thread's side ----------------------------------------------------------

    def next_event(self) -> Event | None:
        """Return the oldest event not yet taken."""
        return self._events.popleft() if self._events else None

    def hand_back(self, lease: Lease) -> None:
        """Give the queue back: it is drained, or its lease was found to be over."""
        self._handed_back.append(lease)
        self._coordinator_wanted.set()

    def block(self, key: QueueKey) -> None:
        """Block the queue:

        handlers of its lost lease still run, and a second owner thread here would run them twice at once.
        """
        self._blocked.add(key)

    def unblock(self, key: QueueKey) -> None:
        """Unblock the queue: the handlers of its lost lease have returned."""
        self._blocked.discard(key)

    def drain(self) -> None:
        """Acquire no more queues: queues handed back from now on are for other instances."""
        self._draining = True

    # -- the coordinator's side -----------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Send an event to the dispatching thread."""
        self._events.append(event)
        self._wake_dispatcher()

    def handed_back(self) -> list[Lease]:
        """Return the leases to be released, oldest first. They stay until they are `released`."""
        return list(self._handed_back)

    def released(self, count: int) -> None:
        """Remove this many of the oldest `handed_back` leases: they were released."""
        for _ in range(count):
            self._handed_back.popleft()

    def hand_back_unused(self, leases: Iterable[Lease]) -> None:
        """Give back acquired leases whose queues were never used."""
        self._handed_back.extend(leases)

    def wait(self, seconds: float) -> None:
        """Wait until a queue is handed back or `wake_coordinator` is called, at most `seconds`."""
        self._coordinator_wanted.wait(seconds)
        self._coordinator_wanted.clear()

    @property
    def is_draining(self) -> bool:
        """Whether no more queues may be acquired."""
        return self._draining

    def outdate(self) -> None:
        """Acquire no more queues, because ids of groups and topics are reused; the process has to register again."""
        self._is_outdated = self._draining = True
        self._wake_dispatcher()

    # -- any thread -----------------------------------------------------------------------------

    @property
    def is_outdated(self) -> bool:
        """Whether the process has to register again."""
        return self._is_outdated

    def is_blocked(self, key: QueueKey) -> bool:
        """Whether handlers of an earlier lease of this queue still run here."""
        return key in self._blocked

    def wake_coordinator(self) -> None:
        """Wake the coordinator now instead of at its next turn, because something may have changed."""
        self._coordinator_wanted.set()
