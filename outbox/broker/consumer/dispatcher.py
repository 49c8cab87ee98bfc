"""The dispatching thread: its loop, and its work: it fetches, starts calls, collects results, and stores offsets.

    handler threads  <->  dispatching thread (`ConsumerSession.loop`)  <->  coordinator (leases)
                              fetches, stores offsets                        heartbeats, rebalances

A `ConsumerSession` has the connection and the loop. At each round it leads (outbox/broker/leading.py) if this process
does, and then calls `Dispatcher.step`. Only the dispatching thread changes the queues of its process.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Final, Protocol
from uuid import UUID

import psycopg

from outbox.broker.consumer import running_calls
from outbox.broker.consumer.call import HandlerCall, Result, TimedOut
from outbox.broker.consumer.coordinator import Coordinator
from outbox.broker.consumer.fetch import (
    BODY,
    KEY,
    OFFSET,
    PASSES,
    RETRIES,
    SECONDS_LEFT,
    SLOT,
    TOPIC_ID,
    Fetcher,
    Row,
    load,
)
from outbox.broker.consumer.lanes import FetchedEntry, Lane, note_time_limits
from outbox.broker.consumer.owned_queue import (
    Change,
    ConsumingGroup,
    EntryOutcome,
    OwnedQueue,
    Ownership,
    Phase,
)
from outbox.broker.consumer.quarantine_runner import QuarantineRunner
from outbox.broker.consumer.results import (
    Failed,
    Waiting,
    book,
    leave_queue,
    postpone,
    put_back,
    record_failures,
    record_left,
)
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.consumer.scheduler import Caller, Calls, RunCall, Scheduler
from outbox.broker.consumer.subscription_runner import STUCK_LIMIT, SubscriptionRunner
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import RECONNECT, Announcements, Channel, listen
from outbox.broker.database.sender import AfterTick, RoundTrip
from outbox.broker.groups import lives, members, offsets, registration
from outbox.broker.groups.leases import QueueKey, lease_clock
from outbox.broker.log.consume_queue import heads
from outbox.broker.log.failing import FailureNote
from outbox.broker.schema import install
from outbox.broker.schema.refusals import next_step
from outbox.codec import Codecs
from outbox.errors import BrokerError, BrokerUnavailable
from outbox.ports import AnyHandler, ClaimingInvoker, Disposition, Invoker, SharingInvoker
from outbox.subscription import Subscription
from outbox.utils import faults, heartbeat

logger = logging.getLogger(__name__)

_ROW: Final = attrgetter("row")
_QUEUE: Final = attrgetter("queue")
_HANDLED_ALONE: Final = {id(Disposition.HANDLED)}
_OFFSET: Final = itemgetter(OFFSET)
_BODY: Final = itemgetter(BODY)
_SECONDS_LEFT: Final = itemgetter(SECONDS_LEFT)
_NONE: Final = {None}


# -- prefetching -----------------------------------------------------------------------------------
#
# The prefetcher brings messages into memory before a handler is free. The prefetcher keeps to the limits of the buffer,
# and loads a large body only right before the call that handles its message.


# The fetch size and the span of a retry queue (see `Subscribed`).
_OF_RETRIES: Final = (256, 4_000)
# The fetch in the round trip of a tick reads this many queues at most. Each queue that has no new entry costs CPU time
# in the session.
_MOST_QUEUES_AHEAD: Final = 16


def room_of(queue: OwnedQueue) -> int:
    """Return how many entries of a queue to fetch now; 0 while enough of its entries are in memory."""
    subscribed = queue.subscribed
    size, span = _OF_RETRIES if subscribed is None else (subscribed.fetch_size, subscribed.span)
    if queue.phase is not Phase.ACTIVE or queue.group.paused or queue.buffered > size // 2:
        return 0
    limit = min(size, queue.window.base + span - queue.fetch_from)
    if queue.end is not None:
        limit = min(limit, queue.end - queue.fetch_from)
    return max(0, limit)


def _by_queue(
    wanted: Sequence[tuple[OwnedQueue, int]], rows: Sequence[Row]
) -> list[tuple[OwnedQueue, int, Sequence[Row]]]:
    """Return each wanted queue, its number of wanted entries and its rows. Raises BrokerError after a wrong row."""
    found: list[tuple[OwnedQueue, int, Sequence[Row]]] = []
    start = 0
    for slot, (queue, room) in enumerate(wanted, start=1):
        end = start
        while end < len(rows) and rows[end][SLOT] == slot:
            end += 1
        found.append((queue, room, rows[start:end]))
        start = end
    if start != len(rows):
        raise BrokerError("the broker returned fetched messages in another order than this process requested.")
    return found


class FetchAhead:
    """The fetch that a leading consumer process sends in the round trip of its tick.

    When the process sends this fetch, it does not know yet which queues the tick will append to. So the fetch reads all
    queues that have room. If the process owns many queues, this class sends nothing.
    """

    def __init__(self, fetcher: Fetcher, owned: Mapping[QueueKey, OwnedQueue]) -> None:
        self._fetcher = fetcher
        self._owned = owned
        self._wanted: list[tuple[OwnedQueue, int]] = []
        self._starts: list[int] = []
        self.rows: list[Row] = []

    def send(self, trip: RoundTrip) -> int | None:
        """Send the fetch. Return its number, or None if there is nothing to fetch or there are too many queues."""
        self._wanted, self._starts = [], []
        for queue in self._owned.values():
            if (room := room_of(queue)) > 0:
                self._wanted.append((queue, room))
                self._starts.append(queue.fetch_from)
        if not 0 < len(self._wanted) <= _MOST_QUEUES_AHEAD:
            return None
        return trip.send_adapted(*self._fetcher.request(self._wanted))

    def answered(self, rows: list[Row]) -> None:
        """Keep the rows until `take`."""
        self.rows = rows

    def take(self) -> list[tuple[OwnedQueue, int, Sequence[Row]]]:
        """Return the rows of each queue like `_by_queue`, without the rows that this process may not use any more.

        Since the fetch was sent, the process may have lost, stopped or resumed a queue, or its group may be paused.
        """
        rows, self.rows = self.rows, []
        usable: list[tuple[OwnedQueue, int, Sequence[Row]]] = []
        for (queue, room, found), start in zip(_by_queue(self._wanted, rows), self._starts, strict=True):
            if found and queue.fetch_from == start and len(found) <= room_of(queue):
                usable.append((queue, room, found))
        return usable


class Prefetcher:
    """Fetches messages into the lanes. Only the dispatching thread uses this class.

    `owned` has the queues of this process. `dirty` collects the queues whose position may have moved. `counts` counts
    the filtered messages. `runners` maps (group id, topic id) to the runner of the subscription.
    """

    def __init__(
        self,
        runners: Mapping[tuple[int, int], SubscriptionRunner],
        owned: Mapping[QueueKey, OwnedQueue],
        dirty: set[OwnedQueue],
        counts: Counter[str],
    ) -> None:
        self._runners = runners
        self._group_ids = {group_id for group_id, _ in runners}
        self._owned = owned
        self._dirty = dirty
        self._counts = counts
        self._fetcher = Fetcher(runner.subscribed for runner in runners.values())
        self.ahead: Final = FetchAhead(self._fetcher, owned)
        # The queues that may have more messages to fetch, in the order of the notifications about them.
        self.to_fetch: Final[dict[OwnedQueue, None]] = {}
        # Whether there may be more messages for which there is room. The dispatching thread then does not wait: nothing
        # else would wake it if all messages of the last fetch were filtered out or dropped from memory.
        self.is_behind = False

    def mark_grown(self, grown: Collection[int] | None) -> None:
        """Note that the queues with these ids have grown. None means that any queue may have grown."""
        if grown is None:
            for queue in self._owned.values():
                self.look_at(queue)
            return
        for queue_id in grown:
            for group_id in self._group_ids:
                if (owned := self._owned.get((group_id, queue_id))) is not None:
                    self.look_at(owned)

    def look_at(self, queue: OwnedQueue) -> None:
        """Note that a queue may have more messages to fetch."""
        self.to_fetch[queue] = None

    def fetch(self, run: Executor) -> None:
        """Fetch messages in one statement, for all queues that may have more messages and whose buffer has room.

        First use the messages that were fetched with the tick. If there are no other messages, send no statement.
        """
        self.is_behind = False
        if self.ahead.rows:
            for queue, room, rows in self.ahead.take():
                self._ingest(queue, room, rows)
        if not self.to_fetch:
            return
        wanted: list[tuple[OwnedQueue, int]] = []
        for queue in tuple(self.to_fetch):
            if queue.phase is not Phase.ACTIVE:
                del self.to_fetch[queue]
            elif (room := room_of(queue)) > 0:
                wanted.append((queue, room))
        if wanted:
            for queue, room, rows in _by_queue(wanted, self._fetcher.fetch(run, wanted)):
                if rows:
                    self._ingest(queue, room, rows)
                    self.is_behind = self.is_behind or (queue in self.to_fetch and room_of(queue) > 0)
                else:
                    del self.to_fetch[queue]

    def _ingest(self, queue: OwnedQueue, room: int, rows: Sequence[Row]) -> None:
        """Put the next entries of a queue into its window and its lanes. `room`: how many were wanted."""
        window = queue.window
        if list(map(_OFFSET, rows)) != list(range(queue.fetch_from, queue.fetch_from + len(rows))):
            expected = queue.fetch_from
            for row in rows:
                if row[OFFSET] < expected:
                    raise BrokerError(f"queue {queue.name} returned offset {row[OFFSET]} where {expected} was next.")
                if row[OFFSET] > expected:
                    window.skip(expected, row[OFFSET])
                expected = row[OFFSET] + 1
        items = [FetchedEntry(queue, row[OFFSET], row[RETRIES], row[KEY], row) for row in rows if row[PASSES]]
        if set(map(_SECONDS_LEFT, rows)) != _NONE:
            note_time_limits(items)
        if len(items) < len(rows):
            for row in rows:
                if not row[PASSES]:
                    is_expired = row[TOPIC_ID] is None
                    window.finish(row[OFFSET], EntryOutcome.EXPIRED if is_expired else EntryOutcome.FILTERED)
            self._counts["filtered"] += len(rows) - len(items)
            self._dirty.add(queue)
        if queue.fetches_again:
            # Do not handle a fetched entry again if this process finished it before the queue was stopped, or if a
            # former owner finished it.
            items = [item for item in items if not window.is_finished(item.offset)]
        queue.fetch_from = rows[-1][OFFSET] + 1
        if len(rows) == room:
            self.to_fetch[queue] = None
        else:
            self.to_fetch.pop(queue, None)
        queue.buffered += len(items)
        if queue.subscribed is not None:
            self._runners[queue.subscribed.key].lane.offer(items)
            if None in map(_BODY, rows):
                _drop_large(items)
        else:
            self._offer_returned(queue, items)

    def _offer_returned(self, queue: OwnedQueue, items: Sequence[FetchedEntry]) -> None:
        """Give messages of the retry queue to the subscription of the topic to which they were published."""
        for item in items:
            assert item.row is not None
            runner = self._runners[queue.group.group_id, item.row[TOPIC_ID]]
            runner.retry_lane.offer([item])
            _drop_large([item])

    def load(self, run: Executor, work: HandlerCall) -> None:
        """Load the messages of a call that are not in memory.

        If retention has removed a message, drop it from the call.

        If the statement fails, all messages of the call go back to their lane.
        """
        missing = [item for item in work.items if item.row is None]
        soon = work.lane.next_shed(missing[0])
        try:
            rows = load(run, [(item.queue.key[1], item.offset) for item in chain(missing, soon)])
        except BaseException:
            for item in work.items:
                item.due = 0.0
            work.lane.end(work.items, work.items)
            raise
        for item in missing:
            item.row = rows.get((item.queue.key[1], item.offset))
            if item.shed:
                item.shed = False
                item.queue.buffered += 1
            if item.row is None:
                item.queue.window.finish(item.offset, EntryOutcome.EXPIRED)
                item.queue.buffered -= 1
                self._dirty.add(item.queue)
        for item in soon:
            # If retention has removed such a message, its own call finds out.
            if (row := rows.get((item.queue.key[1], item.offset))) is not None:
                item.row, item.shed = row, False
                item.queue.buffered += 1
        note_time_limits(missing)
        work.expired = [item for item in missing if item.row is None]
        work.items = [item for item in work.items if item.row is not None]


def _drop_large(items: Sequence[FetchedEntry]) -> None:
    """Drop each row that was fetched without its large body; `load` reads the message again before its call."""
    for item in items:
        if item.row is not None and item.row[BODY] is None:
            item.row = None


# -- the dispatching thread ------------------------------------------------------------------------


# While messages arrive, the dispatching thread stores offsets at this interval (seconds). After a kill, the messages
# that were handled since the last store are delivered again.
STORE_SECONDS: Final = 0.05
# For this time (seconds) after a hand-over begins, the process still starts the messages that come before the last
# started message of the queue. If the process did not start these messages, unfinished offsets would stay below
# finished offsets.
DRAIN_SECONDS: Final = 3.0


class Dispatcher:
    """Does the work of the dispatching thread in bounded steps.

    If a step raises an error, each of its changes is either complete or not made at all.
    """

    def __init__(
        self,
        instance: UUID,
        groups: Sequence[ConsumingGroup],
        ownership: Ownership,
        run: RunCall,
        *,
        lease_seconds: float = 10.0,
        sharing_calls: int = 1,
        threads: int | None = None,
    ) -> None:
        self._instance = instance
        self._lease_seconds = lease_seconds
        self._groups = groups
        subscribed = [one for group in groups for one in group.subscribed.values()]
        self.scheduler: Final = Scheduler([one.subscription for one in subscribed], run, threads)
        self._runners = {
            one.key: SubscriptionRunner(one, self.scheduler.lock, sharing_calls=sharing_calls) for one in subscribed
        }
        self._ownership = ownership
        self._life: UUID | None = None
        self._owned: dict[QueueKey, OwnedQueue] = {}
        self.calls: Final = Calls(self._runners, self.scheduler)
        self._quarantine = QuarantineRunner(instance, self.calls)
        self._dirty: set[OwnedQueue] = set()
        # The runners of subscriptions that may have something new for operators.
        self._to_report: set[SubscriptionRunner] = set()
        self._store_at = 0.0
        self._bounded = self._draining = False
        # The calls that are over with the `id()` of their messages that were not started, their failures, and their
        # messages that leave their queues: from `_collect` until `_end_calls` has stored them.
        self._over: list[tuple[HandlerCall, set[int]]] = []
        self._failed: list[Failed] = []
        self._waiting: list[Waiting] = []
        # The results of calls whose claimed message has left its queue. They are stored in the next step.
        self._left: deque[tuple[HandlerCall, Result]] = deque()
        # While this process drains: the time (time.monotonic) at which it gives up the calls with claimed messages.
        self._claims_until = float("inf")
        self.counts: Counter[str] = Counter()
        self._prefetcher = Prefetcher(self._runners, self._owned, self._dirty, self.counts)
        # The fetch for a tick of this process. The rows are used in the next `step`.
        self.fetch_ahead: Final = self._prefetcher.ahead

    # -- called by the loop ------------------------------------------------------------------------

    def step(self, run: Executor, grown: Collection[int] | None) -> None:
        """Do all work that is possible now. `grown` has the ids of queues that have grown; None means any queue."""
        if grown is None or grown:
            self._prefetcher.mark_grown(grown)
        self._adopt(run)
        self._collect(run)
        if self.calls.has_claims:
            self._keep_claims(run)
        if self._quarantine.verdicts:
            self._quarantine.store_verdicts(run)
        for runner in tuple(self._to_report):
            runner.report(run, self._instance)
            self._to_report.discard(runner)
        self._prefetcher.fetch(run)
        self._dispatch(run)
        self._store(run)
        if not self._dirty:
            self._hand_over_drained()

    def wait_seconds(self, longest: float) -> float:
        """Return how many seconds the dispatching thread may wait until work is due.

        Call this right before the wait.
        """
        if self._prefetcher.is_behind:
            return self.calls.sleep(0.0)
        now = time.monotonic()
        due = [now + longest, *self.calls.deadlines()]
        for runner in self._runners.values():
            is_silent = self._quarantine.silent or runner.subscribed.group.paused
            if not is_silent and (at := runner.next_at(now)) is not None:
                due.append(at)
            if runner.admission is not None and (at := runner.admission.next_at(now)) is not None:
                due.append(at)
            if runner.calls.waiting and (at := self.scheduler.spread_at(runner.calls)) is not None:
                due.append(at)
        if now < self._claims_until:
            due.append(self._claims_until)
        if self._dirty:
            due.append(self._store_at)
        for queue in self._owned.values():
            if queue.start_until > now:
                due.append(queue.start_until)
        return self.calls.sleep(max(0.0, min(due) - now))

    @property
    def is_idle(self) -> bool:
        """Whether no call is running, and there is nothing to fetch or to store now.

        Blocked messages may still wait.
        """
        fetchable = any(room_of(queue) > 0 for queue in self._prefetcher.to_fetch)
        return not self.calls.any_counting and not fetchable and not self._dirty and not self._left

    @property
    def is_drained(self) -> bool:
        """Whether all queues are handed over and no handler call is running, apart from abandoned calls."""
        return not self._owned and not self.calls.any_counting and not self._left

    @property
    def hung(self) -> str:
        """The reason why this process must end, so that other processes handle its messages; '' if it need not end."""
        return self.calls.hung() if self.calls.abandoned else ""

    def enter_life(self, life: UUID) -> None:
        """From now on, accept only queues acquired in `life` (groups.lives), and give up the queues of other lives."""
        is_new = life != self._life
        self._life = life
        self.fetch_ahead.rows = []
        for queue in [queue for queue in self._owned.values() if queue.lease.life != life]:
            self._lose(queue)
        if not is_new:
            return
        # A restore may have removed a retry queue, and another queue may have its id now.
        for group in self._groups:
            group.retry_queues.clear()
        self.calls.forget_redeliveries()
        for work, _ in self._left:
            work.redelivery = None
        for runner in self._runners.values():
            if runner.admission is not None:
                runner.admission.forget()

    def bound(self, run: Executor) -> None:
        """From now on, fetch only the messages that are in the queues now."""
        self._adopt(run)
        self._bounded = True
        self._quarantine.bound()
        ends = heads(run, {key[1] for key in self._owned})
        for queue in self._owned.values():
            queue.end = ends[queue.key[1]]

    def drain(self, *, claims_seconds: float = float("inf")) -> None:
        """Begin to hand over all queues.

        The process finishes the running calls and each message that comes before a message of these calls. Then it
        stores the offsets. After `claims_seconds`, the process does not wait any longer for handlers of claimed
        messages: their claims end with their terms, and another process then handles the messages.
        """
        self._draining = True
        self._claims_until = time.monotonic() + claims_seconds
        self._quarantine.drain()
        self._ownership.is_draining = True
        for queue in list(self._owned.values()):
            self._begin_hand_over(queue)

    # -- events ---------------------------------------------------------------------------------

    def _adopt(self, run: Executor) -> None:
        while self._ownership.changes:
            change, queue = self._ownership.changes.popleft()
            if queue is None:
                self.enter_life(lives.current(run))
            elif change is Change.ACQUIRED:
                self._begin(queue)
            elif self._owned.get(queue.key) is not queue:
                # This process has given the queue up meanwhile.
                pass
            elif change is Change.HAND_OVER:
                self._begin_hand_over(queue)
            elif change is Change.LOST:
                self._lose(queue)
            else:
                self._stop_or_resume(queue, change is Change.STOPPED)
        now = lease_clock()
        for queue in tuple(self._owned.values()):
            if now >= queue.lease.trusted_until:
                self._lose(queue)
        if self._ownership.blocked:
            for queue in tuple(self._ownership.blocked.values()):
                if queue.running == 0:
                    del self._ownership.blocked[queue.key]

    def _begin(self, queue: OwnedQueue) -> None:
        """Begin to consume a queue that the coordinator has acquired."""
        if queue.lease.life != self._life or queue.key in self._ownership.blocked:
            # Its positions belong to another life of the server, which the coordinator or this thread has not seen yet.
            # Or the queue was lost and acquired again while its handlers were still running: if this process kept it,
            # two calls could handle the same message at the same time.
            self._ownership.hand_back(queue.lease)
            return
        if not self._bounded:
            # A bounded pass handles only entries that existed when the pass began.
            self._prefetcher.look_at(queue)
        self._owned[queue.key] = queue
        if queue.window.base != queue.stored_offset:
            # Retention has removed the first entries of this queue, or a former owner has finished these entries
            # without storing its offset.
            self._dirty.add(queue)
        if self._draining:
            self._begin_hand_over(queue)

    def _begin_hand_over(self, queue: OwnedQueue) -> None:
        """Begin to hand over a queue.

        An unfinished message may still be started if it comes before a started or finished message of this queue. The
        next owner begins at the first unfinished message, and delivers all messages after it again.
        """
        if queue.phase not in (Phase.ACTIVE, Phase.STOPPED):
            return
        end = max(queue.window.finished_end, self.calls.end_of_started(queue))
        self._forget_waiting(queue, end if queue.phase is Phase.ACTIVE else 0)
        queue.phase = Phase.DRAINING
        queue.start_until = time.monotonic() + DRAIN_SECONDS
        self._dirty.add(queue)
        self._store_at = 0.0

    def _hand_over_drained(self) -> None:
        now = time.monotonic()
        for queue in tuple(self._owned.values()):
            if queue.phase is not Phase.DRAINING:
                continue
            if now >= queue.start_until or queue.group.paused:
                self._forget_waiting(queue)
            if queue.running or any(lane.has_ready(queue) for lane in self._lanes_of(queue)):
                continue
            self._forget_waiting(queue)
            del self._owned[queue.key]
            self._ownership.hand_back(queue.lease)

    def _lose(self, queue: OwnedQueue) -> None:
        logger.warning(
            "the lease of queue %s for group %s is lost; %d messages of this queue are being handled",
            queue.name,
            queue.group.name,
            queue.running,
        )
        queue.phase = Phase.LOST
        self._forget_waiting(queue)
        self._dirty.discard(queue)
        self._owned.pop(queue.key, None)
        if queue.running:
            self._ownership.blocked[queue.key] = queue
        self._ownership.hand_back(queue.lease)

    def _stop_or_resume(self, queue: OwnedQueue, stops: bool) -> None:
        if stops and queue.phase is Phase.ACTIVE:
            queue.stop()
            self._forget_waiting(queue)
        elif not stops and queue.phase is Phase.STOPPED and queue.running == 0:
            # Resume the queue only if none of its calls is running, because the messages of a running call would be
            # handled twice. Until the queue is resumed, the coordinator asks again and again.
            queue.resume()
            self._prefetcher.look_at(queue)

    def _lanes_of(self, queue: OwnedQueue) -> list[Lane]:
        of_queue = [queue.subscribed] if queue.subscribed is not None else queue.group.subscribed.values()
        return [lane for subscribed in of_queue for lane in self._runners[subscribed.key].lanes]

    def _forget_waiting(self, queue: OwnedQueue, from_offset: int = 0) -> None:
        for lane in self._lanes_of(queue):
            lane.drop(queue, from_offset)
        self.calls.drop(queue, from_offset)
        queue.buffered = queue.running

    # -- collecting -----------------------------------------------------------------------------

    def _collect(self, run: Executor) -> None:
        """Book the finished calls and the calls that have timed out.

        If the connection is lost meanwhile, the next step continues with the results of these calls: they may be stored
        already, so the handlers must not be called again.
        """
        calls = self.calls
        if calls.abandoned or calls.has_admissions:
            calls.take_back()
        for work, results in calls.take_ended() if calls.any_counting else ():
            self._absorb(work, results)
        if time.monotonic() >= self._claims_until:
            for work, results in calls.give_up_claims():
                self._absorb(work, results)
        if self._over:
            self._end_calls(run)
            self._over, self._failed, self._waiting = [], [], []

    def _keep_claims(self, run: Executor) -> None:
        """Let the claimed messages of slow calls leave their queues, and store the results of such calls.

        If a statement fails, the next step continues with it.
        """
        now = time.monotonic()
        for work in self.calls.leaving(now):
            queue = work.items[0].queue
            is_detached = work.keeps_order or queue.lease.life != self._life
            kept = is_detached or leave_queue(run, self._instance, work)
            work.has_left = True
            queue.returned()
            if is_detached:
                # Hand the queue over without waiting for the handler. The next owner delivers the message again: while
                # the claim lasts, this delivery waits, and blocks the later messages of its key. This process starts no
                # later message of the queue, so none of the key can overtake the message if its attempt fails.
                self._forget_waiting(queue)
            elif queue.phase is Phase.LOST:
                pass
            elif kept:
                self._dirty.add(queue)
            else:
                self._lose(queue)
        for work in self.calls.to_renew(now):
            postpone(run, work)
        while self._left:
            work, result = self._left[0]
            runner = self._runners[work.subscribed.key]
            record_left(run, work, result, runner.outage)
            self._to_report.add(runner)
            self._left.popleft()

    def _absorb(self, work: HandlerCall, results: Sequence[Result]) -> None:
        """Book the results of a call."""
        if work.has_left:
            self._quarantine.over(work, results, ())
            self._left.append((work, results[0]))
            self.counts["handled"] += results[0] is Disposition.HANDLED
            self.counts["failed"] += isinstance(results[0], BaseException)
            self._over.append((work, set()))
            return
        # First subtract the items of this call from the number of running items of their queue. If `_lose` is called
        # for a queue below, this number decides whether the queue is blocked.
        for item in work.items:
            item.queue.returned()
        runner = self._runners[work.subscribed.key]
        was_outage = runner.outage.resume_at is not None
        again: set[int] = set()
        # Compare by identity: an error of a handler may define `__eq__`, which may raise.
        all_handled = set(map(id, results)) == _HANDLED_ALONE
        if all_handled:
            for queue, items in groupby(work.items, _QUEUE):
                if queue.phase is not Phase.LOST:
                    queue.window.finish_all([item.offset for item in items], EntryOutcome.HANDLED)
            runner.outage.succeeded(time.monotonic(), work.started_at)
            self.counts["handled"] += len(results)
        else:
            booked = book(work, results, runner.outage)
            again = booked.again
            self._failed += booked.failed
            self._waiting += booked.waiting
            for queue in booked.lost:
                self._lose(queue)
            for report in runner.reports:
                report.note(results)
            self.counts["handled"] += sum(result is Disposition.HANDLED for result in results)
            self.counts["skipped"] += sum(result is Disposition.SKIPPED for result in results)
        if self._quarantine.held is not None:
            self._quarantine.over(work, results, again)
        self._over.append((work, again))
        if was_outage or not all_handled:
            self._to_report.add(runner)
        for item in work.items:
            if item.queue.phase is not Phase.LOST:
                self._dirty.add(item.queue)

    def _end_calls(self, run: Executor) -> None:
        """Record all failures. Then put the messages that this process will try again into their lanes.

        A lane hands out its next messages as soon as a call is ended. So the failed messages of the call must be in
        the lane before the call is ended. This method compares items by identity, because one message may be in its
        queue and in a retry queue at once.
        """
        again = record_failures(run, self._instance, self._failed) if self._failed else []
        if self._waiting:
            not_stored, lost = put_back(run, self._instance, self._waiting)
            again += not_stored
            for queue in lost:
                if queue.phase is not Phase.LOST:
                    self._lose(queue)
        for one in self._failed:
            self.counts["timed_out" if isinstance(one.error, TimedOut) else "failed"] += 1
            if one.item.queue.phase is Phase.STOPPED:
                # One of these failures has stopped the queue, and later messages must not overtake the failed message.
                self._forget_waiting(one.item.queue)
        kept: set[int] = set()
        for item in again:
            # Keep failed messages also while their queue is drained, because they must block the later messages of
            # their key or queue.
            if item.queue.phase in (Phase.ACTIVE, Phase.DRAINING):
                kept.add(id(item))
        for work, unstarted in self._over:
            left = kept | unstarted
            back = [item for item in work.items if id(item) in left] if left else []
            for item in back:
                item.queue.buffered += 1
            if work.abandoned and work.blocks_until_returned and (back or not work.subscribed.ordered):
                self.calls.keep_until_returned(work, back)
            else:
                work.lane.end([*work.items, *work.expired], back)

    # -- handing out ----------------------------------------------------------------------------

    def _dispatch(self, run: Executor) -> None:
        now = time.monotonic()
        quarantine = self._quarantine
        if quarantine.held is not None:
            quarantine.proceed(run)
        # Each step gives calls to every subscription whose threads have room, so there are no weights: no
        # subscription waits for the backlog of another one. What remains is Python's interpreter lock.
        for runner in self._runners.values():
            own, group = runner.calls, runner.subscribed.group
            if own.waiting and (at := self.scheduler.spread_at(own)) is not None and now >= at:
                self.scheduler.spread(own)
            if (admission := runner.admission) is not None:
                may_start = not (group.paused or quarantine.silent) and runner.may_call(now)
                admission.prepare(run, self._instance, now, term_seconds=self._lease_seconds, may_start=may_start)
                if own.is_allowance_new:
                    own.is_allowance_new = False
                    self.scheduler.spread(own)
                now = time.monotonic()
            if group.paused:
                continue
            for lane in runner.lanes:
                while (
                    (lane.ready or lane.later or admission is not None)
                    and not quarantine.silent
                    and runner.admits(now)
                    and (items := lane.take(now))
                ):
                    if admission is not None:
                        admission.spend(items, now)
                    self._submit(run, HandlerCall(runner.subscribed, lane, items))
            has_room = own.in_hand < own.usable_threads and not own.stuck
            runner.backlog = (not has_room and own.is_full) or (admission is not None and admission.waiting > 0)
        self.calls.watched = self._watches()

    def _watches(self) -> bool:
        """Return whether each running call must wake the dispatching thread when it ends."""
        if self._draining or self._bounded or self._quarantine.held is not None or self._ownership.blocked:
            return True
        for runner in self._runners.values():
            if runner.outage.resume_at is not None:
                return True
        for queue in self._owned.values():  # noqa: SIM110 (a generator takes a frame per queue, at each step)
            if queue.phase is not Phase.ACTIVE:
                return True
        return False

    def _submit(self, run: Executor, work: HandlerCall) -> None:
        if not all(map(_ROW, work.items)):
            self._prefetcher.load(run, work)
        if not work.items:
            work.lane.end(work.expired, [])
        elif not (work.subscribed.group.quarantined and self._quarantine.takes(run, work)):
            self.calls.submit(work)
        else:
            self._quarantine.proceed(run)

    # -- offsets --------------------------------------------------------------------------------

    def _store(self, run: Executor) -> None:
        """Store the changed positions of all queues in one statement, and give up the queues whose lease is over."""
        now = time.monotonic()
        if not self._dirty or (now < self._store_at and (self.calls.any_running or not self._bounded)):
            return
        for queue in self._dirty:
            queue.window.advance()
        moved = [(queue, row) for queue in self._dirty if not queue.group.broadcast and (row := queue.next_row())]
        if moved:
            faults.point("consumer.before_offset")
            kept = offsets.store(run, self._instance, [row for _, row in moved])
            faults.point("consumer.after_offset")
            for queue, row in moved:
                queue.stored_offset = row.position.next_offset
                if queue.key not in kept:
                    self._lose(queue)
        self._store_at = now + STORE_SECONDS
        self._dirty.clear()


# -- waking the dispatching thread -----------------------------------------------------------------
#
# Other threads use a `WakeUp` to wake the dispatching thread, which waits on a socket.


class WakeUp:
    """`set` makes `socket` readable until `clear`. A second `set` before `clear` does nothing."""

    def __init__(self) -> None:
        self.socket, self._sender = socket.socketpair()
        self.socket.setblocking(False)
        self._sender.setblocking(False)
        self._is_set = False

    def set(self) -> None:
        """Wake the waiting thread. The caller first stores the data that this thread should see."""
        if not self._is_set:
            self._is_set = True
            # If the socket is full or closed, the waiting thread is already awake or has ended.
            with contextlib.suppress(OSError):
                self._sender.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait until another thread calls `set`, at most `seconds`."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        poller.poll(seconds * 1000)

    def clear(self) -> None:
        """Make the socket ready for the next `set`. The caller looks for work after this call."""
        try:  # noqa: SIM105 (`suppress` takes three frames, at each wait)
            # The socket never holds more than 64 bytes.
            self.socket.recv(64)
        except OSError:
            pass
        # Reset the flag last. If the flag were reset first, the `recv` above could remove the byte of a new `set`, and
        # all later calls of `set` would be ignored.
        self._is_set = False

    def close(self) -> None:
        """Release the sockets."""
        self.socket.close()
        self._sender.close()


# -- one membership of this process in its groups --------------------------------------------------
#
# A `ConsumerSession` is one membership of this process in its groups. A session has the connection and the loop around
# the dispatcher.


# If no notification arrives, the process looks at its queues at this interval (seconds). The first constant applies to
# a connection with LISTEN, and the second constant to a connection without LISTEN.
_LISTENING_POLL_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 1.0
_THREADS_SECONDS: Final = 2.0
# The loop beats at this interval (seconds), and after each failure.
_BEAT_SECONDS: Final = 0.5


class SessionTask(Protocol):
    """Work besides consuming that the dispatching thread of a consumer process does on its listening connection."""

    def begin(self, run: Executor, instance: uuid.UUID) -> None:
        """Begin the work on a new connection."""

    def lead(
        self, run: Executor, announcements: Announcements, *, decided: bool, after: AfterTick | None = None
    ) -> str | None:
        """Do a limited amount of due work. Return the ids of the queues that have grown: '' for any, None for none.

        `decided` says that a notification on Channel.DECIDED has arrived. `after` is the fetch that may share the round
        trip of a tick.

        Raises only psycopg.Error, and only if the connection is lost.
        """

    def wait_seconds(self) -> float:
        """Return how many seconds the caller may wait for a notification before work is due."""

    @property
    def is_gathering(self) -> bool:
        """Whether the caller should wait a moment before it reads notifications."""

    def interrupted(self) -> None:
        """Note that the connection is lost."""

    def end(self, run: Executor) -> None:
        """Stop this work, so that another process can continue the work at once.

        Raises psycopg.Error. The caller calls this method before it stops or gives up its connection.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What all memberships of a process have in common (see `ConsumerRuntime`). `note`: reports what fails in them."""

    database: BrokerDatabase
    subscriptions: Sequence[tuple[Subscription, AnyHandler]]
    note: FailureNote
    invoker: Invoker
    codecs: Codecs
    lease_seconds: float
    share: SharingInvoker | None
    sharing_calls: int
    threads: int | None
    claim: ClaimingInvoker | None
    claims_seconds: float

    def register(self, run: Executor, instance: UUID) -> list[ConsumingGroup]:
        """Register this process in its groups.

        Raises UnknownTopic, InvalidSubscription, InvalidFilter, InconsistentSubscription or SchemaError.
        """
        install.check_schema(run.connection, run.schema)
        members.release_the_ended(run)
        found: dict[str, ConsumingGroup] = {}
        for subscription, handler in self.subscriptions:
            ids = registration.register(run, subscription, instance=instance)
            group = found.setdefault(
                subscription.group,
                ConsumingGroup(ids.group_id, subscription.group, subscription.broadcast),
            )
            group.subscribe(subscription, handler, ids.topic_id)
        return list(found.values())


class ConsumerSession:
    """One membership of this process in its groups.

    The constructor registers the process, and raises psycopg.Error, BrokerUnavailable, or the errors of
    `SessionOptions.register`.

    `noted_in` is the file in which an earlier session of this process noted its calls. The parent process gives
    each consumer process only one file for notes.
    """

    def __init__(
        self, options: SessionOptions, session_task: SessionTask | None = None, noted_in: RunningCalls | None = None
    ) -> None:
        self._options = options
        self._database = database = options.database
        self._poll_seconds = _POLL_SECONDS
        self.wake_up = WakeUp()
        self._run: Executor | None = None
        self._announcements: Announcements | None = None
        self._polled_at = 0.0
        # The ids of the queues that have grown; None if any queue may have grown.
        self._grown: set[int] | None = None
        self._is_new = True
        self._decided = False
        # Whether the dispatcher has made a step on this connection. Before the first step, this process does not lead,
        # because the step may fail on this connection.
        self._has_stepped = False
        self._session_task = session_task
        self._instance = instance = uuid.uuid4()
        try:
            groups = options.register(self._connected(), instance)
        except BaseException:
            self._disconnect()
            self.wake_up.close()
            raise
        self._ownership = Ownership(self.wake_up.set)
        self.coordinator = Coordinator(
            database,
            instance,
            groups,
            self._ownership,
            lease_seconds=options.lease_seconds,
            report=lambda: self.dispatcher.calls.report(),
        )
        self.running_calls = noted_in or _running_calls(instance, groups)
        if noted_in is not None:
            noted_in.go_on_as(instance)
        caller = Caller(
            options.invoker,
            options.codecs,
            self._finished,
            self.running_calls,
            options.share,
            claim=options.claim,
            wake=self.wake_up.set,
        )
        self.dispatcher = Dispatcher(
            instance,
            groups,
            self._ownership,
            caller.run,
            lease_seconds=options.lease_seconds,
            sharing_calls=options.sharing_calls,
            threads=options.threads,
        )

    @property
    def has_to_end(self) -> bool:
        """Whether too many handlers hang, or the process needs a new session.

        A new session is needed if the broker was restored to a time before the registration of this session.
        """
        return self._ownership.is_outdated or self.dispatcher.hung != ""

    def begin_pass(self) -> None:
        """Acquire queues, and from now on fetch only the messages that are in the queues now."""
        self.coordinator.run_once(self._lent())
        self.dispatcher.bound(self._run_in_current_life())
        self.coordinator.start(after_a_round=True)

    def loop(self, until: Callable[[], bool], *, patient: bool = True) -> None:
        """Make steps and wait between them, until the function `until` returns True after a step.

        If `patient` is true, the loop pauses after a database error, and then tries again.
        """
        failures, beat_at = 0, 0.0
        while True:
            try:
                self._step()
                if (now := time.monotonic()) >= beat_at:
                    heartbeat.beat(ready=True)
                    self._options.note.worked()
                    beat_at = now + _BEAT_SECONDS
                if until():
                    return
                self._wait(self._polled_at + self._poll_seconds - time.monotonic())
                failures = 0
            except (psycopg.Error, BrokerUnavailable) as error:
                if not patient:
                    raise
                self._disconnect()
                if until():
                    return
                failures, beat_at = failures + 1, 0.0
                heartbeat.beat(ready=False)
                self._options.note.failed(error)
                pause = RECONNECT.pause_seconds(failures)
                logger.warning("consuming is interrupted, trying again in %.1f s: %s%s", pause, error, next_step(error))
                self.wake_up.wait(pause)
                self.wake_up.clear()

    def finish(self) -> None:
        """Let running handlers finish, store offsets, release the leases, and leave the groups.

        The end of a session takes at most the timeout of the handlers.
        """
        session_task, self._session_task = self._session_task, None
        if session_task is not None and self._run is not None:
            with contextlib.suppress(psycopg.Error):
                session_task.end(self._run)
        self.dispatcher.drain(claims_seconds=self._options.claims_seconds)
        give_up_at = time.monotonic() + self._options.lease_seconds

        def over() -> bool:
            # Without a database, this process cannot store or release anything, so it ends and its leases expire.
            lost = self._run is None and time.monotonic() > give_up_at
            return self.dispatcher.is_drained or (lost and not self.dispatcher.calls.any_running)

        self.loop(until=over)
        self.coordinator.stop(self._lent())
        self.dispatcher.scheduler.stop(within_seconds=_THREADS_SECONDS)
        self._disconnect()
        self.wake_up.close()

    def _finished(self, work: HandlerCall) -> None:
        if self.dispatcher.calls.finished(work):
            self.wake_up.set()

    def _step(self) -> None:
        run = self._run
        if run is None or self._is_new or self._announcements is None:
            run = self._run_in_current_life()
        session_task, announcements = self._session_task, self._announcements
        if self._has_stepped and session_task is not None and announcements is not None:
            decided, self._decided = self._decided, False
            ahead = self.dispatcher.fetch_ahead
            # Rows of a tick whose step has failed. The entries stay in the queues, and a later fetch reads them again.
            ahead.rows = []
            # Notifications that arrive during the tick wait until the rows of its fetch are used. If one of another
            # leader were noted before, these rows would hide that its queue has grown again.
            if (found := session_task.lead(run, announcements, decided=decided, after=ahead)) is not None:
                self._note_grown(found)
        now = time.monotonic()
        grown, self._grown = self._grown, set()
        if grown is None or now - self._polled_at >= self._poll_seconds:
            grown, self._polled_at = None, now
        self.dispatcher.step(run, grown)
        self._has_stepped = True

    def _wait(self, longest: float) -> None:
        """Wait until a wake-up or a notification arrives, or until work is due."""
        # Without LISTEN this process would lead too slowly, so it leaves the lead to another process.
        session_task = self._session_task if self._announcements is not None else None
        if session_task is not None:
            longest = 0.0 if self._decided else min(longest, session_task.wait_seconds())
        seconds = self.dispatcher.wait_seconds(max(0.0, longest))
        if self._announcements is None or (session_task is not None and session_task.is_gathering):
            self.wake_up.wait(seconds)
        elif arrived := self._announcements.wait(seconds, self.wake_up.socket):
            self._note_announcements(arrived)
        self.wake_up.clear()

    def _note_announcements(self, arrived: Mapping[str, Collection[str]]) -> None:
        schema = self._database.schema
        if Channel.SHARED.name_in(schema) in arrived:
            self._ownership.wake_coordinator()
        self._decided |= Channel.DECIDED.name_in(schema) in arrived
        for queue_ids in arrived.get(Channel.QUEUED.name_in(schema), ()):
            self._note_grown(queue_ids)

    def _note_grown(self, queue_ids: str) -> None:
        # Any database session may send a notification. If its payload is not a list of ids, look at all queues.
        if self._grown is None or not queue_ids.replace(" ", "").isdecimal():
            self._grown = None
            return
        try:
            self._grown.update(map(int, queue_ids.split()))
        except ValueError:
            # Python refuses a number of more than 4,300 digits.
            self._grown = None

    def _run_in_current_life(self) -> Executor:
        """Return the connection. If the server has begun a new life, first make the dispatcher drop its older data."""
        run = self._connected()
        # Behind a pooler there is no LISTEN, and a connection may stay open when the server restarts. So read the life
        # of the server at each call of this method.
        if self._is_new or self._announcements is None:
            self.dispatcher.enter_life(lives.current(run))
            self._is_new = False
        return run

    def _lent(self) -> BrokerConnection | None:
        """Return the connection that the coordinator may use while this thread waits for it."""
        connection = self._run.connection if self._run is not None else None
        return connection if isinstance(connection, BrokerConnection) else None

    def _connected(self) -> Executor:
        """Return the connection of the dispatching thread.

        The connection listens for notifications unless a pooler is in between.
        """
        if self._run is None:
            connection = self._database.open(name="outbox-consumer", direct=True)
            run = Executor(connection, self._database.schema)
            listening = timeouts.lasts(connection)
            self._poll_seconds = _LISTENING_POLL_SECONDS if listening else _POLL_SECONDS
            try:
                # While no message is published, this database session is idle for seconds, so the session must have no
                # timeout that ends an idle session.
                timeouts.limit_locks_where_direct(connection)
                if listening:
                    queued = Channel.QUEUED.name_in(run.schema)
                    announcements = Announcements(connection, without_own=queued)
                    listen(run, Channel.QUEUED, Channel.SHARED)
                    self._announcements = announcements
                    if self._session_task is not None:
                        self._session_task.begin(run, self._instance)
            except BaseException:
                connection.close()
                raise
            # The notifications that were sent while there was no connection are lost, so any queue may have grown.
            self._grown = None
            self._run = run
            self._is_new = True
        return self._run

    def _disconnect(self) -> None:
        run, self._run, self._announcements = self._run, None, None
        self._has_stepped = False
        if self._session_task is not None:
            if run is not None and not run.connection.closed:
                with contextlib.suppress(psycopg.Error):
                    self._session_task.end(run)
            self._session_task.interrupted()
        if run is not None:
            run.connection.close()


def _running_calls(instance: uuid.UUID, groups: Sequence[ConsumingGroup]) -> RunningCalls | None:
    subscriptions = [subscribed.subscription for group in groups for subscribed in group.subscribed.values()]
    # The file needs a slot for each thread and for each hanging call. The process ends as soon as the number of hanging
    # calls is above the limit, so the file has one slot more than the limit.
    calls = sum(subscription.threads * (1 + STUCK_LIMIT) + 1 for subscription in subscriptions)
    try:
        return running_calls.inherited(instance, calls=calls, batch=max(one.batch for one in subscriptions))
    except OSError as error:
        logger.warning("this process cannot note its calls, so a message that kills it cannot be found: %s", error)
        return None
