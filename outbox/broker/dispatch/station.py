"""What this process consumes: its groups, and for each subscription a station with lanes and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from outbox.broker.dispatch.lanes.concurrent import ConcurrentLane
from outbox.broker.dispatch.lanes.key_ordered import KeyOrderedLane
from outbox.broker.dispatch.lanes.orderly import OrderlyLane
from outbox.broker.dispatch.owned_queue import HeldQueue
from outbox.broker.dispatch.work import Item, Work
from outbox.broker.dispatch.worker_pool import WorkerPool
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler
from outbox.subscription import Mode, Subscription

_LEAST_FETCH: Final = 128
_MOST_FETCH: Final = 1000
# How far a queue is consumed beyond its lowest unfinished message: the most that is redelivered after a crash.
_SPAN: Final = {Mode.CONCURRENT: 4_000, Mode.ORDERLY: 4_000, Mode.KEY_ORDERED: 50_000}


class Lane(Protocol):
    """Keeps fetched messages and says which of them may be handled next."""

    def offer(self, items: Sequence[Item]) -> None:
        """Take fetched messages, in queue order."""

    def take(self, now: float) -> list[Item]:
        """The messages of the next call; empty when there is none."""

    def settle(self, items: Sequence[Item], again: Sequence[Item]) -> None:
        """What one `take` gave is over; those in `again` are to be tried here again when they are due."""

    def drop(self, queue: HeldQueue, from_offset: int = 0) -> None:
        """Forget the waiting messages of a queue from an offset on."""

    def has_ready(self, queue: HeldQueue) -> bool:
        """Whether messages of a queue wait that nothing holds up."""

    def next_at(self) -> float | None:
        """When something that is held up goes on, if anything is."""


@dataclass
class ConsumingGroup:
    """A consumer group in this process. `stations` by topic id."""

    group_id: int
    name: str
    broadcast: bool
    retry_queue_id: int | None
    stations: dict[int, Station] = field(default_factory=dict)
    paused: bool = False
    generation: int = 1


class Station:
    """One subscription of this process: where its messages wait and which threads handle them."""

    def __init__(
        self,
        group: ConsumingGroup,
        subscription: Subscription,
        handler: AnyHandler,
        topic_id: int,
        run: Callable[[Work], None],
    ) -> None:
        self.group: Final = group
        self.subscription: Final = subscription
        self.handler: Final = handler
        self.topic_id: Final = topic_id
        self.filter: Final = parse_filter(subscription.filter)
        self.filter_number = 0
        self.ordered: Final = subscription.mode is not Mode.CONCURRENT
        self.lane: Final = _lane(subscription)
        # A message that comes from the retry queue has given up its order.
        self.retry_lane: Final[Lane] = ConcurrentLane(subscription.batch) if self.ordered else self.lane
        self.pool: Final = WorkerPool(
            f"{subscription.group}-{subscription.topic}", subscription.threads, run, batches=subscription.batch > 1
        )
        self.fetch_size: Final = min(_MOST_FETCH, max(_LEAST_FETCH, 2 * subscription.batch))
        self.span: Final = _SPAN[subscription.mode]
        group.stations[topic_id] = self

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Where its messages wait; retried ones first."""
        return (self.retry_lane, self.lane) if self.ordered else (self.lane,)


def _lane(subscription: Subscription) -> Lane:
    if subscription.mode is Mode.ORDERLY:
        return OrderlyLane(subscription.batch)
    if subscription.mode is Mode.KEY_ORDERED:
        return KeyOrderedLane(subscription.batch)
    return ConcurrentLane(subscription.batch)
