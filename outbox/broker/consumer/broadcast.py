"""Broadcast groups: every instance handles every message.

There is nothing to share out and nothing to fence, so there are no leases, and positions live in memory: an instance
begins where its subscription's `start` says **each time it starts** - FIRST reads again all that is retained (to build
a cache), LAST sees only what comes while it runs. A failed message is retried in place by the instance that failed,
after the delays of its retry policy, and given up with a logged error after the last attempt: the group has no retry
queue and no dead letters, since those would reach one instance only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.dispatch.owned_queue import HeldQueue
from outbox.broker.dispatch.station import ConsumingGroup
from outbox.broker.groups.leases import Lease
from outbox.broker.groups.offsets import Position
from outbox.broker.log.consume_queue import starting_offsets

_QUEUES = Statement("""
SELECT topic_id, queue_id, number, generation, closed_at
FROM {schema}.queue WHERE topic_id = ANY(%(topic_ids)s::integer[])
ORDER BY topic_id, generation, number
""")


class Follower:
    """Finds the queues of broadcast groups, new ones too, one generation of a topic after the other."""

    def __init__(self, groups: Sequence[ConsumingGroup]) -> None:
        self._groups = groups
        self._held: dict[tuple[int, int], HeldQueue] = {}
        self._started: dict[tuple[int, int], dict[int, int]] = {}

    def gained(self, run: Executor) -> list[HeldQueue]:
        """Queues that are consumed from now on."""
        topic_ids = {topic_id for group in self._groups for topic_id in group.stations}
        if not topic_ids:
            return []
        found: list[HeldQueue] = []
        rows = run.rows(_QUEUES, {"topic_ids": arrays.integers(sorted(topic_ids))})
        for group in self._groups:
            for topic_id, station in group.stations.items():
                place = (group.group_id, topic_id)
                if place not in self._started:
                    self._started[place] = starting_offsets(run, topic_id, station.subscription.start)
                of_topic = [row[1:] for row in rows if row[0] == topic_id]
                found += self._next_generation(group, topic_id, of_topic)
        return found

    def _next_generation(
        self, group: ConsumingGroup, topic_id: int, rows: Sequence[tuple[int, int, int, int | None]]
    ) -> list[HeldQueue]:
        station = group.stations[topic_id]
        starts = self._started[group.group_id, topic_id]
        found: list[HeldQueue] = []
        turn: int | None = None
        for queue_id, number, generation, closed_at in rows:
            held = self._held.get((group.group_id, queue_id))
            at = held.window.base if held is not None else starts.get(queue_id, 0)
            if closed_at is not None and at >= closed_at:
                continue
            turn = generation if turn is None else turn
            if held is None and generation == turn:
                start = starts.get(queue_id, 0)
                lease = Lease((group.group_id, queue_id), 0, math.inf)
                name = f"{station.subscription.topic}/{number}"
                held = HeldQueue(lease, group, station, name, Position(start, start))
                self._held[held.key] = held
                found.append(held)
        return found
