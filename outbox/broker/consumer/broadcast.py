"""Broadcast groups: every instance handles every message.

Queues are neither shared nor fenced, so there are no leases, and positions are kept in memory. An instance begins at
its subscription's `start` **each time it starts**. FIRST reads all retained messages again (to build a cache). LAST
sees only messages that arrive while it runs. The instance on which a message failed retries it in place, after the
delays of its retry policy. After the last attempt it logs an error and gives the message up. The group has no retry
queue and no dead letters, since those would reach one instance only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.dispatch.subscriptions import ConsumingGroup
from outbox.broker.fastpath import arrays
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.offsets import Position
from outbox.broker.log.consume_queue import starting_offsets

_QUEUES = Statement("""
SELECT topic_id, queue_id, number, generation AS layout, closed_at
FROM {schema}.queue WHERE topic_id = ANY(%(topic_ids)s::integer[])
ORDER BY topic_id, generation, number
""")


class BroadcastQueues:
    """Finds the queues of broadcast groups, new ones too, one generation of a topic after the other."""

    def __init__(self, groups: Sequence[ConsumingGroup]) -> None:
        self._groups = groups
        self._owned: dict[tuple[int, int], OwnedQueue] = {}
        # The start by group and topic or, after an interruption, by group and queue.
        self._started: dict[tuple[int, int], dict[int, int]] = {}
        self._interrupted: dict[QueueKey, int] = {}

    def rewind(self, lives: Sequence[Mapping[int, int]]) -> list[Lease]:
        """Return the leases of queues to give up, because the server has begun further lives with these heads.

        The queues can be taken again afterwards. Offsets from such a head on belong to other messages than those that
        may have been handled.
        """
        lost = [queue.lease for queue in self._owned.values()]
        for lease in lost:
            self.returned(lease)
        for positions in self._started.values():
            for queue_id in positions:
                positions[queue_id] = _before(positions[queue_id], queue_id, lives)
        for group_id, queue_id in self._interrupted:
            at = self._interrupted[group_id, queue_id]
            self._interrupted[group_id, queue_id] = _before(at, queue_id, lives)
        return lost

    def returned(self, lease: Lease) -> None:
        """Record that a queue is no longer consumed; it can be taken again from its present position."""
        queue = self._owned.get(lease.key)
        if queue is not None and queue.lease is lease:
            del self._owned[lease.key]
            self._interrupted[lease.key] = queue.next_offset

    def gained(self, run: Executor, life: UUID, is_blocked: Callable[[QueueKey], bool]) -> list[OwnedQueue]:
        """Return the queues to consume from now on, except those whose earlier handlers still run."""
        topic_ids = {topic_id for group in self._groups for topic_id in group.subscribed}
        if not topic_ids:
            return []
        found: list[OwnedQueue] = []
        rows = run.rows(_QUEUES, {"topic_ids": arrays.integers(sorted(topic_ids))})
        for group in self._groups:
            for topic_id, subscribed in group.subscribed.items():
                place = (group.group_id, topic_id)
                if place not in self._started:
                    self._started[place] = starting_offsets(run, topic_id, subscribed.subscription.start)
                of_topic = [row[1:] for row in rows if row[0] == topic_id]
                found += self._next_layout(group, topic_id, of_topic, life, is_blocked)
        return found

    def _next_layout(
        self,
        group: ConsumingGroup,
        topic_id: int,
        rows: Sequence[tuple[int, int, int, int | None]],
        life: UUID,
        is_blocked: Callable[[QueueKey], bool],
    ) -> list[OwnedQueue]:
        subscribed = group.subscribed[topic_id]
        starts = self._started[group.group_id, topic_id]
        found: list[OwnedQueue] = []
        turn: int | None = None
        for queue_id, number, layout, closed_at in rows:
            key = (group.group_id, queue_id)
            owned = self._owned.get(key)
            start = self._interrupted.get(key, starts.get(queue_id, 0))
            at = owned.next_offset if owned is not None else start
            if closed_at is not None and at >= closed_at:
                continue
            turn = layout if turn is None else turn
            if owned is None and layout == turn and not is_blocked(key):
                lease = Lease(key, 0, math.inf, life)
                name = f"{subscribed.subscription.topic}/{number}"
                queue = OwnedQueue(lease, group, subscribed, name, Position(start, start))
                self._owned[queue.key] = queue
                found.append(queue)
        return found


def _before(offset: int, queue_id: int, lives: Sequence[Mapping[int, int]]) -> int:
    return min([offset, *(heads.get(queue_id, 0) for heads in lives)])
