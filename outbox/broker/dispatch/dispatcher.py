"""The dispatching thread: fetches, hands out, collects, stores offsets. It alone touches the queues it holds."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from outbox import faults
from outbox.broker.consumer.coordinator import Event, Gained, HandOver, Keeper, Lost, Stopped, Switched
from outbox.broker.database.executor import Executor
from outbox.broker.dispatch.failures import Failed, FailureDesk
from outbox.broker.dispatch.intake import Intake, room_of
from outbox.broker.dispatch.owned_queue import HeldQueue, Outcome, Phase
from outbox.broker.dispatch.station import ConsumingGroup, Lane
from outbox.broker.dispatch.work import Item, Result, Work
from outbox.broker.groups import offsets
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.log.consume_queue import heads
from outbox.errors import HandlerTimedOut
from outbox.ports import Disposition

logger = logging.getLogger(__name__)

# Offsets are stored this often while messages flow: the most that a killed process has handled again.
STORE_SECONDS: Final = 0.05
# How long a queue that is handed over still starts messages that wait before ones it has started.
DRAIN_SECONDS: Final = 3.0


class Dispatcher:
    """One step after another, each bounded. A step that raises leaves everything as it was or done."""

    def __init__(self, instance: UUID, groups: Sequence[ConsumingGroup], keeper: Keeper) -> None:
        self._instance = instance
        self._groups = {group.group_id: group for group in groups}
        self._stations = [station for group in groups for station in group.stations.values()]
        self._keeper = keeper
        self._desk = FailureDesk(instance)
        self._held: dict[QueueKey, HeldQueue] = {}
        self._stale: list[HeldQueue] = []
        self._running: set[Work] = set()
        self._stuck: dict[Work, list[Item]] = {}
        self._dirty: set[HeldQueue] = set()
        self._store_at = 0.0
        self._bounded = False
        self._draining = False
        self.finished: deque[Work] = deque()
        self.counts: Counter[str] = Counter()
        self._intake = Intake(self._stations, self._desk, self._dirty, self.counts)

    # -- what the loop asks ---------------------------------------------------------------------

    def step(self, run: Executor, *, announced: bool) -> None:
        """Do what can be done now. `announced`: queues may have grown."""
        if announced:
            for queue in self._held.values():
                queue.hungry = True
        self._adopt(run)
        self._collect(run)
        self._intake.fetch(run, self._held.values())
        self._dispatch(run)
        self._store(run)
        if not self._dirty:
            self._hand_over_drained()

    def wait_seconds(self, longest: float) -> float:
        """How long nothing needs to be done unless somebody rings."""
        now = time.monotonic()
        due = [
            at
            for station in self._stations
            if station.pool.room > 0 and not station.group.paused
            for lane in station.lanes
            if (at := lane.next_at()) is not None
        ]
        due += [
            work.started_at + work.station.subscription.timeout_seconds for work in self._running if work.started_at
        ]
        if self._dirty:
            due.append(self._store_at)
        due += [queue.start_until for queue in self._held.values() if queue.start_until > now]
        return max(0.0, min([longest, *(at - now for at in due)]))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, nothing waits but what is held up, and nothing more can be fetched or stored."""
        fetchable = any(queue.hungry and room_of(queue) > 0 for queue in self._held.values())
        return not self._running and not self.finished and not fetchable and not self._dirty

    @property
    def is_drained(self) -> bool:
        """Whether everything was handed over and no handler runs that still counts."""
        return not self._held and not self._running and not self.finished

    @property
    def is_running(self) -> bool:
        """Whether a handler runs that still counts."""
        return bool(self._running)

    def bound(self, run: Executor) -> None:
        """From now on fetch only what the queues hold now."""
        self._adopt(run)
        self._bounded = True
        ends = heads(run, {key[1] for key in self._held})
        for queue in self._held.values():
            queue.end = ends[queue.key[1]]

    def drain(self) -> None:
        """Start nothing more; what runs is finished, stored and handed over."""
        self._draining = True
        self._keeper.drain()
        for queue in list(self._held.values()):
            self._begin_hand_over(queue)

    def stop_threads(self, *, within_seconds: float) -> None:
        """End the handlers' threads."""
        for station in self._stations:
            station.pool.stop(within_seconds=within_seconds)

    # -- events ---------------------------------------------------------------------------------

    def _adopt(self, run: Executor) -> None:
        while self._keeper.events:
            self._apply(self._keeper.events.popleft())
        for queue in [queue for queue in self._held.values() if not queue.trusted()]:
            self._lose(queue)
        for queue in self._stale:
            if queue.running == 0:
                self._keeper.lingering.discard(queue.key)
        self._stale = [queue for queue in self._stale if queue.running > 0]

    def _apply(self, event: Event) -> None:
        match event:
            case Gained(queue) if queue.key in self._keeper.lingering:
                # Lost and taken again in one breath: what runs of it would run a second time beside itself.
                self._keeper.hand_back(queue.lease)
            case Gained(queue):
                # A bounded pass takes what there was when it began.
                queue.hungry = not self._bounded
                self._held[queue.key] = queue
                if self._draining:
                    self._begin_hand_over(queue)
            case HandOver(lease):
                if (held := self._current(lease)) is not None:
                    self._begin_hand_over(held)
            case Lost(lease):
                if (held := self._current(lease)) is not None:
                    self._lose(held)
            case Switched(group_id, paused, generation):
                self._groups[group_id].paused = paused
                self._groups[group_id].generation = generation
            case Stopped(key, stopped):
                self._stop_or_resume(self._held.get(key), stopped)

    def _current(self, lease: Lease) -> HeldQueue | None:
        held = self._held.get(lease.key)
        return held if held is not None and held.lease is lease else None

    def _begin_hand_over(self, queue: HeldQueue) -> None:
        """Let what was started leave no holes: the next owner would deliver again what lies beyond the first one."""
        if queue.phase not in (Phase.ACTIVE, Phase.STOPPED):
            return
        started = [item.offset for work in self._running for item in work.items if item.queue is queue]
        end = max(queue.window.finished_end, *(offset + 1 for offset in started), 0)
        self._forget_waiting(queue, end if queue.phase is Phase.ACTIVE else 0)
        queue.phase = Phase.DRAINING
        queue.start_until = time.monotonic() + DRAIN_SECONDS
        self._dirty.add(queue)
        self._store_at = 0.0

    def _hand_over_drained(self) -> None:
        now = time.monotonic()
        for queue in [queue for queue in self._held.values() if queue.phase is Phase.DRAINING]:
            if now >= queue.start_until or queue.group.paused:
                self._forget_waiting(queue)
            if queue.running or any(lane.has_ready(queue) for lane in self._lanes_of(queue)):
                continue
            self._forget_waiting(queue)
            del self._held[queue.key]
            self._keeper.hand_back(queue.lease)

    def _lose(self, queue: HeldQueue) -> None:
        logger.warning(
            "the lease of queue %s for group %s is lost; %d messages of it are being handled",
            queue.name,
            queue.group.name,
            queue.running,
        )
        queue.phase = Phase.LOST
        self._forget_waiting(queue)
        self._dirty.discard(queue)
        self._held.pop(queue.key, None)
        if queue.running:
            self._keeper.lingering.add(queue.key)
            self._stale.append(queue)
        self._keeper.hand_back(queue.lease)

    def _stop_or_resume(self, queue: HeldQueue | None, stopped: bool) -> None:
        if queue is None:
            return
        if stopped and queue.phase is Phase.ACTIVE:
            queue.phase = Phase.STOPPED
            self._forget_waiting(queue)
        elif not stopped and queue.phase is Phase.STOPPED and queue.running == 0:
            # While something runs, it would be fetched and run again; the keeper says it again.
            queue.phase = Phase.ACTIVE
            queue.rewind()

    def _lanes_of(self, queue: HeldQueue) -> list[Lane]:
        stations = [queue.station] if queue.station is not None else self._groups[queue.key[0]].stations.values()
        return [lane for station in stations for lane in station.lanes]

    def _forget_waiting(self, queue: HeldQueue, from_offset: int = 0) -> None:
        for lane in self._lanes_of(queue):
            lane.drop(queue, from_offset)
        queue.buffered = queue.running

    # -- collecting -----------------------------------------------------------------------------

    def _collect(self, run: Executor) -> None:
        """Book what handlers have finished, and what they did not finish in time."""
        failures: list[Failed] = []
        over: list[tuple[Work, set[int]]] = []
        while self.finished:
            work = self.finished.popleft()
            if work.abandoned:
                self._late(work)
                continue
            self._running.discard(work)
            work.station.pool.collected()
            over.append((work, self._absorb(work, work.results, failures)))
        for work in self._overdue():
            self._running.discard(work)
            work.station.pool.replace_stuck()
            error = HandlerTimedOut(f"{work.abandoned}; the attempt counts as failed and its late result is ignored.")
            over.append((work, self._absorb(work, [error] * len(work.items), failures)))
        if over:
            self._conclude(run, over, failures)

    def _absorb(self, work: Work, results: Sequence[Result], failures: list[Failed]) -> set[int]:
        """Book the results of a call; returns the ids of messages that were not started and still can be, here."""
        unstarted: set[int] = set()
        counted = Counter(item.queue for item in work.items)
        for queue, count in counted.items():
            queue.running -= count
            queue.buffered -= count
        for item, result in zip(work.items, results, strict=True):
            queue = item.queue
            if queue.phase is Phase.LOST:
                continue
            if result is Disposition.HANDLED:
                queue.window.finish(item.offset, Outcome.HANDLED)
            elif result is Disposition.SKIPPED:
                queue.window.finish(item.offset, Outcome.SKIPPED)
            elif isinstance(result, BaseException):
                failures.append(Failed(work.station, item, result))
            elif queue.phase is Phase.STOPPED:
                # Fetched again when it is resumed.
                continue
            elif queue.trusted():
                item.due = 0.0
                unstarted.add(id(item))
            else:
                # Now, not when it is next looked at: a renewal until then would leave a hole where this message was.
                self._lose(queue)
        self.counts["handled"] += results.count(Disposition.HANDLED)
        self.counts["skipped"] += results.count(Disposition.SKIPPED)
        self._dirty.update(queue for queue in counted if queue.phase is not Phase.LOST)
        return unstarted

    def _conclude(self, run: Executor, over: Sequence[tuple[Work, set[int]]], failures: Sequence[Failed]) -> None:
        again = self._desk.handle(run, failures) if failures else []
        self.counts["failed"] += len(failures)
        for queue in {failed.item.queue for failed in failures}:
            if queue.phase is Phase.STOPPED:
                self._forget_waiting(queue)
        # Also while draining: a failed message must hold up the later ones of its line.
        kept = {id(item) for item in again if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)}
        for work, unstarted in over:
            left = kept | unstarted
            back = [item for item in work.items if id(item) in left] if left else []
            for item in back:
                item.queue.buffered += 1
            if back and work.abandoned and work.station.ordered:
                # One at a time: the next attempt waits until the stuck call has returned.
                self._stuck[work] = back
            else:
                work.lane.settle([*work.items, *work.expired], back)

    def _overdue(self) -> list[Work]:
        now = time.monotonic()
        overdue: list[Work] = []
        for work in self._running:
            limit = work.station.subscription.timeout_seconds
            if work.started_at is not None and now - work.started_at >= limit and not work.results:
                work.abandoned = f"the handler of group {work.station.group.name!r} ran longer than {limit:g} s"
                overdue.append(work)
        return overdue

    def _late(self, work: Work) -> None:
        """A call that was given up has returned: its result does not count, but its line may go on."""
        work.station.pool.unstuck()
        back = self._stuck.pop(work, None)
        if back is not None:
            back = [item for item in back if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING)]
            work.lane.settle(work.items, back)

    # -- handing out ----------------------------------------------------------------------------

    def _dispatch(self, run: Executor) -> None:
        now = time.monotonic()
        for station in self._stations:
            if station.group.paused:
                continue
            for lane in station.lanes:
                while station.pool.room > 0 and (items := lane.take(now)):
                    self._submit(run, Work(station, lane, items))

    def _submit(self, run: Executor, work: Work) -> None:
        if any(item.row is None for item in work.items):
            self._intake.load(run, work)
        if not work.items:
            work.lane.settle(work.expired, [])
            return
        for item in work.items:
            item.queue.running += 1
        self._running.add(work)
        work.station.pool.submit(work)

    # -- offsets --------------------------------------------------------------------------------

    def _store(self, run: Executor) -> None:
        """Store positions that moved, all queues in one statement, and let go of queues that are drained."""
        now = time.monotonic()
        if not self._dirty or (now < self._store_at and (self._running or not self._bounded)):
            return
        for queue in self._dirty:
            queue.window.advance()
        moved = [(queue, row) for queue in self._dirty if not queue.group.broadcast and (row := queue.next_row())]
        if moved:
            faults.point("consumer.before_offset")
            kept = offsets.store(run, self._instance, [row for _, row in moved])
            faults.point("consumer.after_offset")
            for queue, row in moved:
                queue.stored_base = row.position.next_offset
                if queue.key not in kept:
                    self._lose(queue)
        self._store_at = now + STORE_SECONDS
        self._dirty.clear()
