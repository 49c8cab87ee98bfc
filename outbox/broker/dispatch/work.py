"""The values that dispatching moves about: fetched entries, and the calls they are handled by."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outbox.ports import Disposition

if TYPE_CHECKING:
    from outbox.broker.dispatch.owned_queue import HeldQueue
    from outbox.broker.dispatch.station import Lane, Station

NOT_STARTED = None
"""The result of a delivery whose handler was not called, because its queue was lost or is being handed over."""

Result = Disposition | BaseException | None


class Item:
    """One fetched entry. `retries` is how often it was sent back before, `in_place` how often it was tried here since.

    `row` is what was fetched (`fetch.Row`); None while it is not kept in memory, because the body is
    large or because the entry waits behind a key that is held up (`shed`). It is loaded when its turn comes.
    """

    __slots__ = ("due", "in_place", "key", "offset", "queue", "retries", "row", "shed")

    def __init__(self, queue: HeldQueue, offset: int, retries: int, key: str, row: tuple[Any, ...] | None) -> None:
        self.queue = queue
        self.offset = offset
        self.retries = retries
        self.key = key
        self.row = row
        self.in_place = 0
        self.shed = False
        # When it is to be tried here again (time.monotonic), once it failed.
        self.due = 0.0

    @property
    def attempt(self) -> int:
        """The number of the attempt that is next or running, from 1."""
        return self.retries + self.in_place + 1


class Work:
    """One call of a handler: some items, and once it is over a result for each."""

    __slots__ = ("abandoned", "expired", "items", "lane", "results", "started_at", "station")

    def __init__(self, station: Station, lane: Lane, items: list[Item]) -> None:
        self.station = station
        self.lane = lane
        self.items = items
        # Taken from the lane with the others, but removed by retention before they could be loaded.
        self.expired: list[Item] = []
        self.results: Sequence[Result] = ()
        self.started_at: float | None = None
        # Why the attempt does not count any more; set by the dispatching thread, read by the handler's.
        self.abandoned = ""

    def start(self) -> None:
        """The handler is being called now."""
        self.started_at = time.monotonic()

    def fence_reason(self) -> str:
        """Why effects of this attempt must not be stored, or '' (see outbox.fence)."""
        if self.abandoned:
            return self.abandoned
        for queue in {id(item.queue): item.queue for item in self.items}.values():
            if not queue.trusted():
                return f"the lease of queue {queue.name} for group {queue.group.name!r} is over"
        return ""
