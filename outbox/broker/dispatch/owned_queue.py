"""A queue as its present owner sees it: fetched entries, unfinished entries, and outcomes of the rest."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from outbox.broker.dispatch.subscriptions import ConsumingGroup, Subscribed
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.offsets import OffsetRow, Position


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
