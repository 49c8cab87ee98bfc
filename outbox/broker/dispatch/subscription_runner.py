"""The waiting messages of one subscription, and the threads that handle them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.dispatch.lanes.concurrent import ConcurrentLane
from outbox.broker.dispatch.lanes.ordered import KeyOrderedLane, OrderlyLane
from outbox.broker.dispatch.outage import Outage
from outbox.broker.dispatch.subscriptions import Subscribed
from outbox.broker.dispatch.work import HandlerCall, Lane
from outbox.broker.dispatch.worker_pool import WorkerPool
from outbox.broker.groups import members
from outbox.subscription import Mode, Subscription


class SubscriptionRunner:
    """The lanes and the worker pool of a subscription. Only the dispatching thread uses it."""

    def __init__(self, subscribed: Subscribed, run: Callable[[HandlerCall], None]) -> None:
        subscription = subscribed.subscription
        self.subscribed: Final = subscribed
        self.lane: Final = _lane(subscription)
        # A message that comes from the retry queue has given up its order.
        self.retry_lane: Final[Lane] = ConcurrentLane(subscription.batch) if subscribed.ordered else self.lane
        # The lanes of its waiting messages; retried ones first.
        self.lanes: Final = (self.retry_lane, self.lane) if subscribed.ordered else (self.lane,)
        self.pool: Final = WorkerPool(
            f"{subscription.group}-{subscription.topic}", subscription.threads, run, batches=subscription.batch > 1
        )
        self.outage: Final = Outage(subscription)
        # Whether messages wait for which the pool has no room.
        self.backlog = False
        self._reported = 0

    @property
    def is_running_out(self) -> bool:
        """Whether messages wait while the threads will soon have none. Any thread."""
        return self.backlog and self.pool.waiting <= self.subscribed.subscription.threads

    def admits(self, now: float) -> bool:
        """Whether a call may be handed to the pool."""
        return self.pool.room > 0 and self.outage.admits(now, running=self.pool.in_hand > 0)

    def next_at(self, now: float) -> float | None:
        """Return when waiting messages may be handed out without a wake-up before that."""
        if self.pool.room == 0:
            return None
        resume_at = self.outage.resume_at
        if resume_at is not None and resume_at > now:
            return resume_at
        if resume_at is not None and self.pool.in_hand > 0:
            # One call at a time; its end wakes the dispatching thread.
            return None
        return min((at for lane in self.lanes if (at := lane.next_at()) is not None), default=None)

    def report_outage(self, run: Executor, instance: UUID) -> None:
        """Store in the database, for operators, that the subscription pauses, or no longer does."""
        pauses = self.outage.pauses
        if pauses == self._reported:
            return
        group_id, topic_id = self.subscribed.key
        if pauses:
            members.report_outage(run, instance, group_id, topic_id, self.outage.error)
        else:
            members.end_outage(run, instance, group_id, topic_id)
        self._reported = pauses


def _lane(subscription: Subscription) -> Lane:
    if subscription.mode is Mode.ORDERLY:
        return OrderlyLane(subscription.batch)
    if subscription.mode is Mode.KEY_ORDERED:
        return KeyOrderedLane(subscription.batch)
    return ConcurrentLane(subscription.batch)
