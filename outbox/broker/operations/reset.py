"""Move a group's offsets: to the first message, the end, a time or a number.

A reset fences the owner of a queue: it raises the lease's epoch and stores the new offset under it. The former owner
detects that its lease is lost, drops its fetched messages, and acquires the queue again at the new offset. Calls that
ran at that moment may take effect once more or, without an inbox, twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from outbox.broker.database.arrays import integers
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups import offsets
from outbox.broker.groups.offsets import OffsetRow, Position
from outbox.broker.groups.registration import group_id_of
from outbox.broker.groups.send_back import forget_sent_away
from outbox.broker.log.consume_queue import starting_offsets
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.progress import list_queues
from outbox.broker.operations.switches import raise_generation
from outbox.errors import UsageError
from outbox.subscription import Start


@dataclass(frozen=True, slots=True)
class QueueReset:
    """The change that a reset made, or would make, to one queue."""

    topic: str
    generation: int
    number: int
    queue_id: int
    from_offset: int
    to_offset: int


_FENCE = Statement("""
INSERT INTO {schema}.queue_lease AS held (group_id, queue_id, owner, epoch, expires_at)
SELECT %(group_id)s, given.queue_id, NULL, 1, clock_timestamp()
FROM unnest(%(queue_ids)s::integer[]) AS given (queue_id)
ORDER BY given.queue_id
ON CONFLICT (group_id, queue_id) DO UPDATE
SET owner = NULL, epoch = held.epoch + 1, expires_at = clock_timestamp(), stopped = NULL
RETURNING queue_id, epoch
""")


def moved_to(position: Position, target: int) -> Position:
    """Return the position after a reset: the counters continue, and `moved` keeps the equation true."""
    start = min(position.start_offset, target)
    counted = position.next_offset - position.start_offset - position.moved
    return replace(position, next_offset=target, start_offset=start, moved=target - start - counted)


def reset(
    run: Executor,
    group: str,
    topic: str,
    target: Start | datetime | int,
    *,
    number: int | None = None,
    reprocess: bool = False,
    dry_run: bool = False,
) -> Sequence[QueueReset]:
    """Move a group on a topic, or only on its queue `number`; returns the queues that move, with both offsets.

    Start.LATEST is the end. A number is limited to the messages that the broker still has. Moving back delivers
    messages again. The inbox skips them unless `reprocess` raises the group's generation. Counters continue; entries
    that were passed over or rewound are counted as `moved`.

    `dry_run` returns the result without a change. Raises UnknownGroup and UnknownTopic. Raises UsageError when the
    group does not consume the topic or the topic has no such queue.
    """
    # Before the first lock: finding a time may read the topic once.
    targets = _targets(run, topic, target)
    with run.connection.transaction():
        group_id = group_id_of(run, group)
        moves = _plan(run, group, topic, targets, number)
        if not dry_run and moves:
            _move(run, group_id, {move.queue_id: move.to_offset for move in moves})
        if reprocess and not dry_run:
            raise_generation(run, group)
    if not dry_run:
        notify(run, Channel.SHARED)
    return moves


def _move(run: Executor, group_id: int, targets: dict[int, int]) -> None:
    values = {"group_id": group_id, "queue_ids": integers(list(targets))}
    epochs = dict(run.execute(_FENCE, values).fetchall())
    # Read under the fence: it includes all that the former owner has stored until now, and nothing later counts.
    positions = offsets.load(run, group_id, list(targets))
    rows = [
        OffsetRow((group_id, queue_id), epochs[queue_id], 0, moved_to(positions[queue_id], target))
        for queue_id, target in targets.items()
    ]
    offsets.place(run, rows)
    forget_sent_away(run, group_id, list(targets))


def _targets(run: Executor, topic: str, target: Start | datetime | int) -> dict[int, int]:
    """Return the target offsets by queue id; a number is not limited yet."""
    topic_id = TopicCatalog(run.schema).get(run.connection, topic).topic_id
    if isinstance(target, int):
        floors = starting_offsets(run, topic_id, Start.EARLIEST)
        return {queue_id: max(target, floor) for queue_id, floor in floors.items()}
    return starting_offsets(run, topic_id, target)


def _plan(run: Executor, group: str, topic: str, targets: Mapping[int, int], number: int | None) -> list[QueueReset]:
    queues = [queue for queue in list_queues(run, group) if queue.topic == topic]
    if not queues:
        raise UsageError(f"group {group!r} does not consume topic {topic!r}, or is a broadcast group: nothing to move.")
    if number is not None and number not in {queue.number for queue in queues}:
        raise UsageError(f"topic {topic!r} has no queue {number}: its queues are 0 to {max(q.number for q in queues)}.")
    moves = [
        # A queue added since the targets were found is new to the group: its position stays.
        QueueReset(q.topic, q.layout, q.number, q.queue_id, q.next_offset, min(targets[q.queue_id], q.head))
        for q in queues
        if q.queue_id in targets and number in (None, q.number)
    ]
    return [move for move in moves if move.to_offset != move.from_offset]
