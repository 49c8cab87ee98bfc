"""The data of dispatching: fetched entries, the lanes in which they wait, and the calls that handle them."""

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
"""The result of a delivery whose handler was not called: its queue was lost or is being handed over."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The result of a delivery whose handler is to be called later; `until` is time.monotonic."""

    until: float


Result = Disposition | BaseException | Postponed | None

_parts: Final = itertools.count(1)


class FetchedEntry:
    """One fetched entry. `retries` counts how often it was sent back, `in_place` the attempts here since then.

    `row` is the fetched row (`fetch.Row`). It is None while it is not kept in memory: the body is large, or the entry
    waits behind a blocked key (`shed`). It is then loaded before its call. `part` numbers the part of a divided batch,
    0 for none: a call takes entries of one part only.
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
        """The number of the next or running attempt, from 1."""
        return self.retries + self.in_place + 1


def divide(items: Sequence[FetchedEntry], size: int) -> None:
    """Limit later calls to `size` of these entries together, and to none of the others."""
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
    """Keeps fetched messages and decides which of them may be handled next."""

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; empty when there is none."""

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End one `take`; the items in `again` are to be tried here again when they are due."""

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on."""

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether a queue has waiting messages that are not blocked."""

    def next_at(self) -> float | None:
        """Return when the first blocked message continues, if there is one."""


class HandlerCall:
    """One call of a handler: some items and, once it is over, a result for each."""

    __slots__ = ("abandoned", "alone", "expired", "items", "lane", "results", "started_at", "subscribed")

    def __init__(self, subscribed: Subscribed, lane: Lane, items: list[FetchedEntry]) -> None:
        self.subscribed = subscribed
        self.lane = lane
        self.items = items
        # Taken from the lane with the others, but removed by retention before they could be loaded.
        self.expired: list[FetchedEntry] = []
        self.results: Sequence[Result] = ()
        # A quarantined message is handled, and nothing else runs here.
        self.alone = False
        self.started_at: float | None = None
        # Why the attempt no longer counts; set by the dispatching thread, read by the handler's.
        self.abandoned = ""

    def start(self) -> None:
        """Record that the handler is being called now."""
        self.started_at = time.monotonic()

    def fence_reason(self) -> str:
        """Return why effects of this attempt must not be stored, or '' (see outbox.utils.fence)."""
        if self.abandoned:
            return self.abandoned
        for queue in {id(item.queue): item.queue for item in self.items}.values():
            if not queue.trusted():
                return f"the lease of queue {queue.name} for group {queue.group.name!r} is over"
        return ""
