"""The values that dispatching moves about: fetched entries, and the calls they are handled by."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outbox.ports import Disposition

if TYPE_CHECKING:
    from outbox.broker.dispatch_queue import HeldQueue

NOT_STARTED = None
"""The result of a delivery whose handler was not called, because its queue was lost or is being handed over."""

Result = Disposition | BaseException | None


class Item:
    """One fetched entry. `retries` is how often it was sent back before, `in_place` how often it was tried here since.

    `row` is what was fetched (`outbox.broker.fetch.Row`); None for an entry behind a key that is held up, whose
    message is loaded again when its turn comes.
    """

    __slots__ = ("in_place", "offset", "queue", "retries", "row")

    def __init__(self, queue: HeldQueue, offset: int, retries: int, row: tuple[Any, ...] | None) -> None:
        self.queue = queue
        self.offset = offset
        self.retries = retries
        self.row = row
        self.in_place = 0

    @property
    def attempt(self) -> int:
        """The number of the attempt that is next or running, from 1."""
        return self.retries + self.in_place + 1


class Work:
    """One call of a handler: some items, and once it is over a result for each."""

    __slots__ = ("abandoned", "items", "results", "started_at")

    def __init__(self, items: list[Item]) -> None:
        self.items = items
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
                return f"the lease of queue {queue.name} for group {queue.group_name!r} is over"
        return ""
