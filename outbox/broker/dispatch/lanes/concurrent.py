"""Concurrent mode: any message may be handled at any time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.dispatch.work import FetchedEntry, take_run


class ConcurrentLane:
    """Hands out fetched messages in the order of arrival, and failed ones again when they are due."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._ready: deque[FetchedEntry] = deque()
        self._later: list[tuple[float, int, FetchedEntry]] = []
        self._numbers = itertools.count()

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages, in queue order."""
        self._ready.extend(items)

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the messages of the next call; empty when there is none."""
        ready = self._ready
        while self._later and self._later[0][0] <= now:
            ready.append(heapq.heappop(self._later)[2])
        return take_run(ready, self._batch)

    def settle(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End one `take`; the items in `again` are to be tried here again when they are due."""
        for item in again:
            heapq.heappush(self._later, (item.due, next(self._numbers), item))

    def drop(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on."""

        def stays(item: FetchedEntry) -> bool:
            return item.queue is not queue or item.offset < from_offset

        self._ready = deque(filter(stays, self._ready))
        self._later = [entry for entry in self._later if stays(entry[2])]
        heapq.heapify(self._later)

    def has_ready(self, queue: OwnedQueue) -> bool:
        """Whether a queue has waiting messages that are not blocked."""
        return any(item.queue is queue for item in self._ready)

    def next_at(self) -> float | None:
        """Return when the first failed message kept here is due, if there is one."""
        return self._later[0][0] if self._later else None
