"""Bring messages into memory ahead of their handlers: fetch within the buffer's limits, load omitted bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.dispatch import failures
from outbox.broker.dispatch.fetch import BODY, KEY, OFFSET, PASSES, RETRIES, SLOT, TOPIC_ID, Fetcher, Row, load
from outbox.broker.dispatch.owned_queue import EntryOutcome, OwnedQueue, Phase
from outbox.broker.dispatch.subscription_runner import SubscriptionRunner
from outbox.broker.dispatch.work import FetchedEntry, HandlerCall
from outbox.broker.groups.leases import QueueKey
from outbox.errors import BrokerError

_RETRY_FETCH_SIZE: Final = 256
_RETRY_SPAN: Final = 4_000


def room_of(queue: OwnedQueue) -> int:
    """Return how many entries of a queue to fetch now; 0 while it has enough."""
    subscribed = queue.subscribed
    size = subscribed.fetch_size if subscribed is not None else _RETRY_FETCH_SIZE
    span = subscribed.span if subscribed is not None else _RETRY_SPAN
    if queue.phase is not Phase.ACTIVE or queue.group.paused or queue.buffered > size // 2:
        return 0
    limit = min(size, queue.window.base + span - queue.fetch_from)
    if queue.end is not None:
        limit = min(limit, queue.end - queue.fetch_from)
    return max(0, limit)


class Prefetcher:
    """Part of the dispatching thread. `dirty` collects queues whose position may have moved.

    `counts` counts the filtered messages. `runners` by (group id, topic id).
    """

    def __init__(
        self,
        instance: UUID,
        runners: Mapping[tuple[int, int], SubscriptionRunner],
        dirty: set[OwnedQueue],
        counts: Counter[str],
    ) -> None:
        self._instance = instance
        self._runners = runners
        self._group_ids = {group_id for group_id, _ in runners}
        self._dirty = dirty
        self._counts = counts
        self._fetcher = Fetcher(runner.subscribed for runner in runners.values())
        # The consumed queues that may have more to fetch, in the order of the notifications.
        self._hungry: dict[OwnedQueue, None] = {}
        # Retried messages of topics that this process does not subscribe to.
        self._foreign: list[tuple[FetchedEntry, Row]] = []

    def mark_grown(self, owned: Mapping[QueueKey, OwnedQueue], grown: Collection[int] | None) -> None:
        """Note that queues with these ids have grown; with None, any may have."""
        if grown is None:
            found = list(owned.values())
        else:
            keys = [(group_id, queue_id) for queue_id in grown for group_id in self._group_ids]
            found = [owned[key] for key in keys if key in owned]
        for queue in found:
            self.look_at(queue)

    def look_at(self, queue: OwnedQueue) -> None:
        """Note that there may be more to fetch of a queue."""
        queue.grown()
        self._hungry[queue] = None

    def fetch(self, run: Executor) -> None:
        """Fetch for all queues that have room and may have more, in one statement."""
        self._hungry = {queue: None for queue in self._hungry if queue.hungry and queue.phase is Phase.ACTIVE}
        wanted = [(queue, room) for queue in self._hungry if (room := room_of(queue)) > 0]
        if wanted:
            rows = self._fetcher.fetch(run, wanted)
            start = 0
            for slot, (queue, room) in enumerate(wanted, start=1):
                end = start
                while end < len(rows) and rows[end][SLOT] == slot:
                    end += 1
                if end == start:
                    queue.rest()
                else:
                    self._ingest(queue, rows[start:end], more=end - start == room)
                start = end
            if start != len(rows):
                raise BrokerError("the broker returned fetched messages in another order than was asked for.")
        if self._foreign:
            self._send_on(run)

    def _ingest(self, queue: OwnedQueue, rows: Sequence[Row], *, more: bool) -> None:
        """Put the next entries of a queue into its window and its lanes."""
        items: list[FetchedEntry] = []
        expected, window = queue.fetch_from, queue.window
        for row in rows:
            offset = row[OFFSET]
            if offset != expected:
                if offset < expected:
                    raise BrokerError(f"queue {queue.name} returned offset {offset} where {expected} was next.")
                window.skip(expected, offset)
            expected = offset + 1
            if row[PASSES]:
                items.append(FetchedEntry(queue, offset, row[RETRIES], row[KEY], row))
            else:
                window.finish(offset, EntryOutcome.EXPIRED if row[TOPIC_ID] is None else EntryOutcome.FILTERED)
        if len(items) < len(rows):
            self._counts["filtered"] += len(rows) - len(items)
            self._dirty.add(queue)
        if queue.fetches_again:
            # Fetched again after a stop: messages finished beyond the stopped one stay finished.
            items = [item for item in items if not window.is_finished(item.offset)]
        queue.fetched(expected, more=more)
        queue.buffer(len(items))
        if queue.subscribed is not None:
            _leave_out_large(items)
            self._runners[queue.subscribed.key].lane.offer(items)
        else:
            self._offer_returned(queue, items)

    def _offer_returned(self, queue: OwnedQueue, items: Sequence[FetchedEntry]) -> None:
        """Give messages of the retry queue to the subscription of the topic to which they were published."""
        for item in items:
            assert item.row is not None
            runner = self._runners.get((queue.group.group_id, item.row[TOPIC_ID]))
            if runner is not None:
                _leave_out_large([item])
                runner.retry_lane.offer([item])
            else:
                self._foreign.append((item, item.row))

    def _send_on(self, run: Executor) -> None:
        """Send on retried messages of topics without a subscription here: another instance may have one."""
        foreign = [(item, row) for item, row in self._foreign if item.queue.phase is Phase.ACTIVE]
        if foreign:
            failures.send_on(run, self._instance, foreign)
        for item, _ in foreign:
            item.queue.unbuffer()
            self._dirty.add(item.queue)
        self._foreign.clear()

    def load(self, run: Executor, work: HandlerCall) -> None:
        """Load the messages of a call that are not in memory; those that retention removed leave the call.

        On an error the call's messages go back to their lane.
        """
        missing = [item for item in work.items if item.row is None]
        try:
            rows = load(run, [(item.queue.key[1], item.offset) for item in missing])
        except BaseException:
            for item in work.items:
                item.due = 0.0
            work.lane.settle(work.items, work.items)
            raise
        for item in missing:
            item.row = rows.get((item.queue.key[1], item.offset))
            if item.shed:
                item.shed = False
                item.queue.buffer()
            if item.row is None:
                item.queue.window.finish(item.offset, EntryOutcome.EXPIRED)
                item.queue.unbuffer()
                self._dirty.add(item.queue)
        work.expired = [item for item in missing if item.row is None]
        work.items = [item for item in work.items if item.row is not None]


def _leave_out_large(items: Sequence[FetchedEntry]) -> None:
    """Drop a row that came without its body: it cannot be handled yet."""
    for item in items:
        if item.row is not None and item.row[BODY] is None:
            item.row = None
