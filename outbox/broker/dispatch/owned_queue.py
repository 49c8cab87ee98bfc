"""A queue as its present owner sees it: what is fetched, what is unfinished, what became of the rest."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.offsets import OffsetRow, Position

if TYPE_CHECKING:
    from outbox.broker.dispatch.station import ConsumingGroup, Station


class Outcome(enum.IntEnum):
    """How an entry was finished; the counters of `consumer_offset`."""

    HANDLED = 0
    FILTERED = 1
    SKIPPED = 2
    SENT_BACK = 3
    DEAD = 4
    EXPIRED = 5


class Phase(enum.Enum):
    """What this process does with a queue it holds."""

    ACTIVE = "active"
    """Fetch and handle."""
    STOPPED = "stopped"
    """An on_error=STOP handler stopped it: keep the lease, start nothing until an operator resumes it."""
    DRAINING = "draining"
    """To be handed over: fetch nothing; finish what runs and what waits before it, store the offset, release."""
    LOST = "lost"
    """Another owner may have it: start nothing, record nothing."""


class Window:
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
        self._finished: dict[int, Outcome] = {}
        self._gaps: dict[int, int] = {}

    def finish(self, offset: int, outcome: Outcome) -> None:
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
                counts[Outcome.EXPIRED] += end - base
                base = end
            else:
                break
        self.base = base

    def position(self) -> Position:
        """The position to store."""
        handled, filtered, skipped, sent_back, dead, expired = self.counts
        return Position(self.base, self.start_offset, handled, filtered, skipped, sent_back, dead, expired, self.moved)


class HeldQueue:
    """A queue this process consumes for a group. Touched by the dispatching thread only, but for `may_start`."""

    __slots__ = (
        "buffered",
        "end",
        "fetch_from",
        "fetched_before",
        "filter_number",
        "group",
        "hungry",
        "key",
        "lease",
        "name",
        "ordinal",
        "phase",
        "running",
        "start_until",
        "station",
        "stored_base",
        "window",
    )

    def __init__(
        self, lease: Lease, group: ConsumingGroup, station: Station | None, name: str, position: Position
    ) -> None:
        self.lease: Final = lease
        self.key: QueueKey = lease.key
        self.group: Final = group
        # None for the retry queue, whose messages are of all topics of the group.
        self.station: Final = station
        self.name: Final = name
        self.window = Window(position)
        self.phase = Phase.ACTIVE
        self.filter_number = station.filter_number if station is not None else 0
        # The next offset to fetch; whether there may be more; entries in memory; entries in running calls.
        self.fetch_from = position.next_offset
        # What is fetched below this is fetched again, after a stop.
        self.fetched_before = 0
        self.hungry = True
        self.buffered = 0
        self.running = 0
        # While it is drained: until when messages may still be started.
        self.start_until = 0.0
        # A bounded pass fetches up to here.
        self.end: int | None = None
        self.ordinal = 0
        self.stored_base = position.next_offset

    def trusted(self) -> bool:
        """Whether the lease may be acted on."""
        return self.lease.trusted()

    def may_start(self) -> bool:
        """Whether a handler may be started for a message of this queue. Safe to ask from any thread."""
        return self.phase in (Phase.ACTIVE, Phase.DRAINING) and self.trusted()

    def skip_to(self, floor: int) -> None:
        """Retention removed everything below `floor`."""
        if floor > self.fetch_from:
            self.window.skip(self.fetch_from, floor)
            self.window.advance()
            self.fetch_from = floor

    def rewind(self) -> None:
        """Fetch again from the lowest unfinished entry. What is finished beyond it stays so (`Window.is_finished`)."""
        self.fetched_before = max(self.fetched_before, self.fetch_from)
        self.fetch_from = self.window.base
        self.hungry = True

    def next_row(self) -> OffsetRow | None:
        """The row to store, if the position moved since the last one."""
        if self.window.base == self.stored_base:
            return None
        self.ordinal += 1
        return OffsetRow(self.key, self.lease.epoch, self.ordinal, self.window.position())
