"""A queue as its present owner sees it: what is fetched, what is unfinished, what became of the rest."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from outbox.broker.dispatch.subscriptions import ConsumingGroup, Subscribed
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.offsets import OffsetRow, Position


class EntryOutcome(enum.IntEnum):
    """How an entry was finished; the counters of `consumer_offset`."""

    HANDLED = 0
    FILTERED = 1
    SKIPPED = 2
    SENT_BACK = 3
    DEAD = 4
    EXPIRED = 5


class Phase(enum.Enum):
    """What this process does with a queue it owns."""

    ACTIVE = "active"
    """Fetch and handle."""
    STOPPED = "stopped"
    """An on_error=STOP handler stopped it: keep the lease, start nothing until an operator resumes it."""
    DRAINING = "draining"
    """To be handed over: fetch nothing; finish what runs and what waits before it, store the offset, release."""
    LOST = "lost"
    """Another owner may have it: start nothing, record nothing."""


class OffsetWindow:
    """Which offsets from the lowest unfinished one on are finished. The stored offset is that lowest one."""

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
        """`offset` is done with. Call `advance` after a group of these."""
        self._finished[offset] = outcome

    def skip(self, start: int, end: int) -> None:
        """Offsets `start` to before `end` were removed by retention before they were fetched."""
        self._gaps[start] = end

    @property
    def finished_end(self) -> int:
        """The offset after the highest finished one."""
        return max(self._finished, default=self.base - 1) + 1

    def is_finished(self, offset: int) -> bool:
        """Whether an offset at or above the base is finished."""
        return offset in self._finished

    def advance(self) -> None:
        """Move the base past everything that is finished without a gap."""
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
        """The position to store."""
        handled, filtered, skipped, sent_back, dead, expired = self.counts
        return Position(self.base, self.start_offset, handled, filtered, skipped, sent_back, dead, expired, self.moved)


class OwnedQueue:
    """A queue that this process consumes for a group, under a lease.

    The coordinator's thread creates it and gives it away with `Gained`. From then on the dispatching thread alone
    calls its methods, but for those that say "any thread": they read single values that are written whole.
    Whoever else uses it reads its fields, and changes them by these methods only.
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
        # While it is drained: until when messages may still be started.
        self.start_until = 0.0
        # A bounded pass fetches up to here.
        self.end: int | None = None
        # What is noted of messages sent away before it is removed.
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
        """Whether an on_error=STOP handler stopped it. Any thread."""
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
        """What was noted of messages sent away before the stored offset is removed."""
        self.swept_offset = self._stored_base

    # -- phases ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Start nothing until it is resumed; one that is drained or lost goes on to be that."""
        if self.phase is Phase.ACTIVE:
            self.phase = Phase.STOPPED

    def resume(self) -> None:
        """Go on after a stop: fetch again from the lowest unfinished entry; what is finished beyond it stays so."""
        self.phase = Phase.ACTIVE
        self._refetched_below = max(self._refetched_below, self.fetch_from)
        self.fetch_from = self.window.base
        self.hungry = True

    def drain(self, *, start_until: float) -> None:
        """Fetch nothing more; what waits before started messages may be started until then (time.monotonic)."""
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
        """Fetch only what lies before `end`."""
        self.end = end

    def skip_to(self, floor: int) -> None:
        """Retention removed everything below `floor`."""
        if floor > self.fetch_from:
            self.window.skip(self.fetch_from, floor)
            self.window.advance()
            self.fetch_from = floor

    def sent_away_before(self, offsets: Mapping[int, bool]) -> None:
        """A former owner sent these messages away (the value: into the dead letters) and could not store its offset."""
        ahead = {offset: is_dead for offset, is_dead in offsets.items() if offset >= self.fetch_from}
        for offset, is_dead in ahead.items():
            self.window.finish(offset, EntryOutcome.DEAD if is_dead else EntryOutcome.SENT_BACK)
        self._refetched_below = max(ahead, default=-1) + 1
        self.window.advance()
        self.fetch_from = max(self.fetch_from, self.window.base)

    @property
    def fetches_again(self) -> bool:
        """Whether some of what is fetched next may be finished: fetched before a stop, or by a former owner."""
        return self.fetch_from < self._refetched_below

    def fetched(self, next_offset: int, *, more: bool) -> None:
        """Everything before `next_offset` was fetched; `more` if there may be more."""
        self.fetch_from = next_offset
        self.hungry = more

    def rest(self) -> None:
        """Fetch nothing until it has grown."""
        self.hungry = False

    # -- what is in memory and what runs ----------------------------------------------------------

    def buffer(self, count: int = 1) -> None:
        """So many more entries are in memory."""
        self.buffered += count

    def unbuffer(self, count: int = 1) -> None:
        """So many entries left memory without a call."""
        self.buffered -= count

    def unbuffer_waiting(self) -> None:
        """Only what runs is still in memory."""
        self.buffered = self.running

    def started(self) -> None:
        """One more entry is in a running call."""
        self.running += 1

    def returned(self, count: int) -> None:
        """So many entries came back from a call; those that are kept here are buffered again."""
        self.running -= count
        self.buffered -= count

    # -- offsets --------------------------------------------------------------------------------

    def next_row(self) -> OffsetRow | None:
        """The row to store, if the position moved since the last one."""
        if self.window.base == self._stored_base:
            return None
        self._ordinal += 1
        return OffsetRow(self.key, self.lease.epoch, self._ordinal, self.window.position())

    def stored(self, row: OffsetRow) -> None:
        """A row was stored."""
        self._stored_base = row.position.next_offset
