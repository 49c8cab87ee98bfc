"""What dispatching moves about: fetched entries, the lanes they wait in, and the calls they are handled by."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.dispatch.subscriptions import Subscribed
from outbox.ports import Disposition

NOT_STARTED = None
"""The result of a delivery whose handler was not called, because its queue was lost or is being handed over."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The result of a delivery whose handler was not called because it is not its turn; `until` is time.monotonic."""

    until: float


Result = Disposition | BaseException | Postponed | None

_parts: Final = itertools.count(1)


class FetchedEntry:
    """One fetched entry. `retries` is how often it was sent back before, `in_place` how often it was tried here since.

    `row` is what was fetched (`fetch.Row`); None while it is not kept in memory, because the body is
    large or because the entry waits behind a key that is held up (`shed`). It is loaded when its turn comes.
    `part` numbers the part of a divided batch it belongs to, 0 for none: a call takes one part, and nothing else.
    """

    __slots__ = ("due", "in_place", "key", "offset", "part", "queue", "retries", "row", "shed")

    def __init__(self, queue: OwnedQueue, offset: int, retries: int, key: str, row: tuple[Any, ...] | None) -> None:
        self.queue = queue
        self.offset = offset
        self.retries = retries
        self.key = key
        self.row = row
        self.in_place = 0
        self.shed = False
        self.part = 0
        # When it is to be tried here again (time.monotonic), once it failed.
        self.due = 0.0

    @property
    def attempt(self) -> int:
        """The number of the attempt that is next or running, from 1."""
        return self.retries + self.in_place + 1


def divide(items: Sequence[FetchedEntry], size: int) -> None:
    """From now on no call takes more than `size` of these together, and none of them with others."""
    for start in range(0, len(items), size):
        part = next(_parts)
        for item in items[start : start + size]:
            item.part = part


def take_run(waiting: deque[FetchedEntry], most: int) -> list[FetchedEntry]:
    """Take up to `most` of the first items that belong to one part of a batch, or to none."""
    if not waiting:
        return []
    part = waiting[0].part
    run: list[FetchedEntry] = []
    while waiting and len(run) < most and waiting[0].part == part:
        run.append(waiting.popleft())
    return run


class Lane(Protocol):
    """Keeps fetched messages and says which of them may be handled next."""

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""

    def take(self, now: float) -> list[FetchedEntry]:
        """The messages of the next call; empty when there is none."""

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """What one `take` gave is over; those in `again` are to be tried here again when they are due."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on."""

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether messages of a queue wait that nothing holds up."""

    def next_at(self) -> float | None:
        """When something that is held up goes on, if anything is."""


class HandlerCall:
    """One call of a handler: some items, and once it is over a result for each."""

    __slots__ = ("abandoned", "alone", "expired", "items", "lane", "results", "started_at", "subscribed")

    def __init__(self, subscribed: Subscribed, lane: Lane, items: list[FetchedEntry]) -> None:
        self.subscribed = subscribed
        self.lane = lane
        self.items = items
        # Taken from the lane with the others, but removed by retention before they could be loaded.
        self.expired: list[FetchedEntry] = []
        self.results: Sequence[Result] = ()
        # A suspect's trial, while nothing else runs here.
        self.alone = False
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
