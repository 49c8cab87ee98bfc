"""The dispatching thread: fetches, hands out, collects, stores offsets. It alone changes the queues it was given."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final
from uuid import UUID

from outbox import faults
from outbox.broker.database.executor import Executor
from outbox.broker.dispatch import failures
from outbox.broker.dispatch.calls import Calls
from outbox.broker.dispatch.failures import Failed
from outbox.broker.dispatch.owned_queue import OwnedQueue, Phase
from outbox.broker.dispatch.ownership import (
    Event,
    GroupChanged,
    LifeChanged,
    Ownership,
    QueueAcquired,
    QueueHandOver,
    QueueLost,
    QueueStopped,
)
from outbox.broker.dispatch.prefetch import Prefetcher, room_of
from outbox.broker.dispatch.results import book
from outbox.broker.dispatch.station import SubscriptionRunner
from outbox.broker.dispatch.subscriptions import ConsumingGroup
from outbox.broker.dispatch.trials import QuarantineRunner
from outbox.broker.dispatch.work import HandlerCall, Lane, Result
from outbox.broker.groups import lives, offsets
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.log.consume_queue import heads
from outbox.ports import Disposition

logger = logging.getLogger(__name__)

# Offsets are stored this often while messages flow: the most that a killed process has handled again.
STORE_SECONDS: Final = 0.05
# How long a queue that is handed over still starts messages that wait before ones it has started.
DRAIN_SECONDS: Final = 3.0


class Dispatcher:
    """One step after another, each bounded. A step that raises leaves everything as it was or done."""

    def __init__(
        self, instance: UUID, groups: Sequence[ConsumingGroup], ownership: Ownership, run: Callable[[HandlerCall], None]
    ) -> None:
        self._instance = instance
        self._groups = {group.group_id: group for group in groups}
        self._stations = {
            subscribed.key: SubscriptionRunner(subscribed, run)
            for group in groups
            for subscribed in group.subscribed.values()
        }
        self._ownership = ownership
        self._life: UUID | None = None
        self._owned: dict[QueueKey, OwnedQueue] = {}
        self._stale: list[OwnedQueue] = []
        self._calls = Calls(self._stations)
        self._trials = QuarantineRunner(instance, self._calls)
        # Called by the handlers' threads; whether this one is to be woken.
        self.finished: Final = self._calls.finished
        self._dirty: set[OwnedQueue] = set()
        self._store_at = 0.0
        self._bounded = self._draining = False
        self.counts: Counter[str] = Counter()
        self._prefetcher = Prefetcher(instance, self._stations, self._dirty, self.counts)

    # -- what the loop asks ---------------------------------------------------------------------

    def step(self, run: Executor, grown: Collection[int] | None) -> None:
        """Do what can be done now. `grown`: the ids of queues that have grown; None if it may be any."""
        self._prefetcher.hear(self._owned, grown)
        self._adopt(run)
        self._collect(run)
        self._trials.settle(run)
        for station in self._stations.values():
            station.tell(run, self._instance)
        self._prefetcher.fetch(run)
        self._dispatch(run)
        self._store(run)
        if not self._dirty:
            self._hand_over_drained()

    def wait_seconds(self, longest: float) -> float:
        """How long nothing needs to be done unless somebody rings; to be asked right before that wait."""
        now = time.monotonic()
        due = [
            at
            for station in self._stations.values()
            if not (station.subscribed.group.paused or self._trials.silent) and (at := station.next_at(now)) is not None
        ]
        due += self._calls.deadlines()
        if self._dirty:
            due.append(self._store_at)
        due += [queue.start_until for queue in self._owned.values() if queue.start_until > now]
        return self._calls.sleep(max(0.0, min([longest, *(at - now for at in due)])))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, nothing waits but what is held up, and nothing more can be fetched or stored."""
        fetchable = any(queue.hungry and room_of(queue) > 0 for queue in self._owned.values())
        return not self._calls.any_counting and not fetchable and not self._dirty

    @property
    def is_drained(self) -> bool:
        """Whether everything was handed over and no handler runs that still counts."""
        return not self._owned and not self._calls.any_counting

    @property
    def is_running(self) -> bool:
        """Whether a handler runs that still counts."""
        return self._calls.any_running

    @property
    def hung(self) -> str:
        """Why this process has to end, so that another can go on with what hangs here; '' if it need not."""
        return self._calls.hung()

    def live(self, life: UUID) -> None:
        """From now on only queues gained in this life count (groups.lives); the others are lost."""
        if life != self._life:
            # A restore may have taken a retry queue back, and another queue may have its id now.
            for group in self._groups.values():
                group.retry_queues.clear()
        self._life = life
        for queue in [queue for queue in self._owned.values() if queue.lease.life != life]:
            self._lose(queue)

    def bound(self, run: Executor) -> None:
        """From now on fetch only what the queues hold now."""
        self._adopt(run)
        self._bounded = True
        ends = heads(run, {key[1] for key in self._owned})
        for queue in self._owned.values():
            queue.bound(ends[queue.key[1]])

    def drain(self) -> None:
        """Start nothing more; what runs is finished, stored and handed over."""
        self._draining = True
        self._trials.drain()
        self._ownership.drain()
        for queue in list(self._owned.values()):
            self._begin_hand_over(queue)

    def stop_threads(self, *, within_seconds: float) -> None:
        """End the handlers' threads."""
        for station in self._stations.values():
            station.pool.stop(within_seconds=within_seconds)

    # -- events ---------------------------------------------------------------------------------

    def _adopt(self, run: Executor) -> None:
        while (event := self._ownership.next_event()) is not None:
            if isinstance(event, LifeChanged):
                self.live(lives.current(run))
            else:
                self._apply(event)
        for queue in [queue for queue in self._owned.values() if not queue.trusted()]:
            self._lose(queue)
        for queue in self._stale:
            if queue.running == 0:
                self._ownership.linger_no_more(queue.key)
        self._stale = [queue for queue in self._stale if queue.running > 0]

    def _apply(self, event: Event) -> None:
        match event:
            case QueueAcquired(queue) if queue.lease.life != self._life:
                # Positions of another life of the server, which not both threads have met yet.
                self._ownership.hand_back(queue.lease)
            case QueueAcquired(queue) if self._ownership.lingers(queue.key):
                # Lost and taken again in one breath: what runs of it would run a second time beside itself.
                self._ownership.hand_back(queue.lease)
            case QueueAcquired(queue):
                if self._bounded:
                    # Such a pass takes what there was when it began.
                    queue.rest()
                else:
                    self._prefetcher.look_at(queue)
                self._owned[queue.key] = queue
                if queue.next_offset != queue.stored_offset:
                    # Retention removed what it began with, or a former owner sent it away.
                    self._dirty.add(queue)
                if self._draining:
                    self._begin_hand_over(queue)
            case QueueHandOver(lease):
                if (current := self._current(lease)) is not None:
                    self._begin_hand_over(current)
            case QueueLost(lease):
                if (current := self._current(lease)) is not None:
                    self._lose(current)
            case GroupChanged(group_id, paused, generation, suspects):
                group = self._groups[group_id]
                group.paused, group.generation, group.suspects = paused, generation, suspects
            case QueueStopped(key, stopped):
                self._stop_or_resume(self._owned.get(key), stopped)

    def _current(self, lease: Lease) -> OwnedQueue | None:
        queue = self._owned.get(lease.key)
        return queue if queue is not None and queue.lease is lease else None

    def _begin_hand_over(self, queue: OwnedQueue) -> None:
        """Let what was started leave no holes: the next owner would deliver again what lies beyond the first one."""
        if queue.phase not in (Phase.ACTIVE, Phase.STOPPED):
            return
        end = max(queue.window.finished_end, self._calls.end_of_started(queue))
        self._forget_waiting(queue, end if queue.phase is Phase.ACTIVE else 0)
        queue.drain(start_until=time.monotonic() + DRAIN_SECONDS)
        self._dirty.add(queue)
        self._store_at = 0.0

    def _hand_over_drained(self) -> None:
        now = time.monotonic()
        for queue in [queue for queue in self._owned.values() if queue.phase is Phase.DRAINING]:
            if now >= queue.start_until or queue.group.paused:
                self._forget_waiting(queue)
            if queue.running or any(lane.has_ready(queue) for lane in self._lanes_of(queue)):
                continue
            self._forget_waiting(queue)
            del self._owned[queue.key]
            self._ownership.hand_back(queue.lease)

    def _lose(self, queue: OwnedQueue) -> None:
        logger.warning(
            "the lease of queue %s for group %s is lost; %d messages of it are being handled",
            queue.name,
            queue.group.name,
            queue.running,
        )
        queue.lose()
        self._forget_waiting(queue)
        self._dirty.discard(queue)
        self._owned.pop(queue.key, None)
        if queue.running:
            self._ownership.linger(queue.key)
            self._stale.append(queue)
        self._ownership.hand_back(queue.lease)

    def _stop_or_resume(self, queue: OwnedQueue | None, stopped: bool) -> None:
        if queue is None:
            return
        if stopped and queue.phase is Phase.ACTIVE:
            queue.stop()
            self._forget_waiting(queue)
        elif not stopped and queue.phase is Phase.STOPPED and queue.running == 0:
            # While something runs, it would be fetched and run again; the coordinator says it again.
            queue.resume()
            self._prefetcher.look_at(queue)

    def _lanes_of(self, queue: OwnedQueue) -> list[Lane]:
        of_queue = [queue.subscribed] if queue.subscribed is not None else queue.group.subscribed.values()
        return [lane for subscribed in of_queue for lane in self._stations[subscribed.key].lanes]

    def _forget_waiting(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        for lane in self._lanes_of(queue):
            lane.drop(queue, from_offset)
        queue.unbuffer_waiting()

    # -- collecting -----------------------------------------------------------------------------

    def _collect(self, run: Executor) -> None:
        """Book what handlers have finished, and what they did not finish in time."""
        failed: list[Failed] = []
        self._calls.take_back()
        over = [(work, self._absorb(work, results, failed)) for work, results in self._calls.over()]
        if over:
            self._conclude(run, over, failed)

    def _absorb(self, work: HandlerCall, results: Sequence[Result], failed: list[Failed]) -> set[int]:
        """Book the results of a call; returns the ids of items that go back to their lane."""
        # First: the queue may be lost below, and then what still runs of it decides whether its key lingers.
        counted = Counter(item.queue for item in work.items)
        for queue, count in counted.items():
            queue.returned(count)
        booked = book(work, results, self._stations[work.subscribed.key].outage)
        self._trials.over(work, results, booked.again)
        failed += booked.failed
        for queue in booked.lost:
            self._lose(queue)
        self.counts["handled"] += results.count(Disposition.HANDLED)
        self.counts["skipped"] += results.count(Disposition.SKIPPED)
        self._dirty.update(queue for queue in counted if queue.phase is not Phase.LOST)
        return booked.again

    def _conclude(self, run: Executor, over: Sequence[tuple[HandlerCall, set[int]]], failed: Sequence[Failed]) -> None:
        """Settle all failures in one statement, then give each lane back what is to be tried here again.

        In this order: a lane whose call is settled hands out its next messages, and a failed one must be back before
        them. By identity: a message may be in the queue and in the retry queue at once.
        """
        again = failures.settle(run, self._instance, failed) if failed else []
        self.counts["failed"] += len(failed)
        for queue in {one.item.queue for one in failed}:
            if queue.is_stopped:
                # One of these failures has stopped it: what waits behind must not overtake the stopped message.
                self._forget_waiting(queue)
        # Also while draining: a failed message must hold up the later ones of its line.
        kept = {id(item) for item in again if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)}
        for work, unstarted in over:
            left = kept | unstarted
            back = [item for item in work.items if id(item) in left] if left else []
            for item in back:
                item.queue.buffer()
            if back and work.abandoned and work.subscribed.ordered:
                self._calls.keep_until_returned(work, back)
            else:
                work.lane.settle([*work.items, *work.expired], back)

    # -- handing out ----------------------------------------------------------------------------

    def _dispatch(self, run: Executor) -> None:
        now = time.monotonic()
        self._trials.proceed(run)
        for station in self._stations.values():
            if station.subscribed.group.paused:
                continue
            for lane in station.lanes:
                while not self._trials.silent and station.admits(now) and (items := lane.take(now)):
                    self._submit(run, HandlerCall(station.subscribed, lane, items))
            station.backlog = station.pool.room == 0
        self._calls.watched = self._watches()

    def _watches(self) -> bool:
        """Whether something is to be done as soon as what runs is over."""
        return (
            self._draining
            or self._bounded
            or self._trials.pending
            or bool(self._stale)
            or any(station.outage.resume_at is not None for station in self._stations.values())
            or any(queue.phase is not Phase.ACTIVE for queue in self._owned.values())
        )

    def _submit(self, run: Executor, work: HandlerCall) -> None:
        if any(item.row is None for item in work.items):
            self._prefetcher.load(run, work)
        if not work.items:
            work.lane.settle(work.expired, [])
        elif not (work.subscribed.group.suspects and self._trials.takes(run, work)):
            self._calls.submit(work)
        else:
            self._trials.proceed(run)

    # -- offsets --------------------------------------------------------------------------------

    def _store(self, run: Executor) -> None:
        """Store positions that moved, all queues in one statement, and let go of queues that are drained."""
        now = time.monotonic()
        if not self._dirty or (now < self._store_at and (self._calls.any_running or not self._bounded)):
            return
        for queue in self._dirty:
            queue.window.advance()
        moved = [(queue, row) for queue in self._dirty if not queue.group.broadcast and (row := queue.next_row())]
        if moved:
            faults.point("consumer.before_offset")
            kept = offsets.store(run, self._instance, [row for _, row in moved])
            faults.point("consumer.after_offset")
            for queue, row in moved:
                queue.stored(row)
                if queue.key not in kept:
                    self._lose(queue)
        self._store_at = now + STORE_SECONDS
        self._dirty.clear()
