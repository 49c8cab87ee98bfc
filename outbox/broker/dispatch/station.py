"""Where the messages of one subscription wait, and the threads that handle them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from outbox.broker.dispatch.lanes.concurrent import ConcurrentLane
from outbox.broker.dispatch.lanes.key_ordered import KeyOrderedLane
from outbox.broker.dispatch.lanes.orderly import OrderlyLane
from outbox.broker.dispatch.subscriptions import Subscribed
from outbox.broker.dispatch.work import Lane, Work
from outbox.broker.dispatch.worker_pool import WorkerPool
from outbox.subscription import Mode, Subscription


class Station:
    """The lanes and the worker pool of a subscription; the dispatching thread's alone."""

    def __init__(self, subscribed: Subscribed, run: Callable[[Work], None]) -> None:
        subscription = subscribed.subscription
        self.subscribed: Final = subscribed
        self.lane: Final = _lane(subscription)
        # A message that comes from the retry queue has given up its order.
        self.retry_lane: Final[Lane] = ConcurrentLane(subscription.batch) if subscribed.ordered else self.lane
        # Where its messages wait; retried ones first.
        self.lanes: Final = (self.retry_lane, self.lane) if subscribed.ordered else (self.lane,)
        self.pool: Final = WorkerPool(
            f"{subscription.group}-{subscription.topic}", subscription.threads, run, batches=subscription.batch > 1
        )


def _lane(subscription: Subscription) -> Lane:
    if subscription.mode is Mode.ORDERLY:
        return OrderlyLane(subscription.batch)
    if subscription.mode is Mode.KEY_ORDERED:
        return KeyOrderedLane(subscription.batch)
    return ConcurrentLane(subscription.batch)
