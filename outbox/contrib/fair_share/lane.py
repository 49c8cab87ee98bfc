"""The lane of a subscription with FairShare: its names are the tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outbox.broker.consumer.fetch import HEADERS
from outbox.broker.consumer.lanes import FetchedEntry, NamedQueue, RoundRobinLane
from outbox.contrib.fair_share.declaration import FairShare

# Only so many characters of a tenant count, as in a key, because the lane keeps the tenant of each message in memory.
_LONGEST: Final = 255


class FairLane(RoundRobinLane[NamedQueue]):
    """A lane whose calls have messages of one tenant after the other."""

    def __init__(self, option: FairShare) -> None:
        super().__init__(NamedQueue)
        self._option: Final = option

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        """Take fetched messages of one queue, in queue order."""
        for item in items:
            item.key = self._tenant(item)
        super().offer(items)

    def _tenant(self, item: FetchedEntry) -> str:
        option = self._option
        if option.key_prefix is not None:
            return item.key.partition(option.key_prefix)[0][:_LONGEST]
        headers: Any = item.row[HEADERS] if item.row is not None else None
        found = headers.get(option.header) if isinstance(headers, dict) else None
        # A message whose headers are not texts fails in its call.
        return found[:_LONGEST] if isinstance(found, str) else ""
