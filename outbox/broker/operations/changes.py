"""Changes by an operator: pause and reset groups; skip or redeliver a message; refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from uuid import UUID

from outbox.broker.database.arrays import integers
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups import offsets, quarantine
from outbox.broker.groups.offsets import OffsetRow, Position
from outbox.broker.groups.registration import ensure_retry_queue, group_id_of, unknown_group
from outbox.broker.groups.send_back import forget_sent_away
from outbox.broker.log.consume_queue import starting_offsets
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.progress import list_queues
from outbox.broker.operations.trace import Whereabouts, whereabouts
from outbox.errors import UsageError
from outbox.subscription import Start

logger = logging.getLogger(__name__)

_PAUSE = Statement("UPDATE {schema}.consumer_group SET paused = %(paused)s WHERE name = %(name)s RETURNING group_id")
_RESUME_QUEUES = Statement("""
UPDATE {schema}.queue_lease SET stopped = NULL WHERE group_id = %(group_id)s AND stopped IS NOT NULL
""")
# The number contains the time (seconds since 2020), so it is new even if a restore has taken earlier resets away.
_RAISE_GENERATION = Statement("""
UPDATE {schema}.consumer_group
SET generation = greatest(generation + 1,
                          extract(epoch FROM clock_timestamp() - timestamptz '2020-01-01 UTC')::integer)
WHERE name = %(name)s RETURNING generation
""")

_REJECT = Statement("""
UPDATE {schema}.broker SET reject_transactional = %(rejecting)s WHERE reject_transactional <> %(rejecting)s
""")


def reject_transactional(run: Executor, rejecting: bool) -> None:
    """Refuse new transactional messages on both paths, or accept them again."""
    if run.count(_REJECT, {"rejecting": rejecting}):
        logger.warning("transactional messages are %s from now on", "refused" if rejecting else "accepted")


def pause(run: Executor, group: str) -> None:
    """Pause a group: it starts no more handlers after about a second. Raises UnknownGroup."""
    _set_paused(run, group, True)
    notify(run, Channel.SHARED)


def _set_paused(run: Executor, group: str, paused: bool) -> int:
    row = run.row(_PAUSE, {"name": group, "paused": paused})
    if row is None:
        raise unknown_group(group)
    return int(row[0])


def resume(run: Executor, group: str) -> int:
    """End the pause of a group, and continue the queues that on_error=STOP has stopped.

    Return the number of the continued queues. Raises UnknownGroup.
    """
    with run.connection.transaction():
        resumed = run.count(_RESUME_QUEUES, {"group_id": _set_paused(run, group, False)})
    notify(run, Channel.SHARED)
    return resumed


def raise_generation(run: Executor, group: str) -> int:
    """Start a new inbox generation and return its number.

    If a message that the inbox knows is then delivered again, the group handles it again.
    """
    row = run.row(_RAISE_GENERATION, {"name": group})
    if row is None:
        raise unknown_group(group)
    return int(row[0])


# ---------------------------------------------------------------------------------------------------------------------
# Move a group's offsets to the first message, to the end of each queue, to a time, or to a given offset.
#
# A reset fences the owner of a queue: it raises the lease's epoch and stores the new offset under the new epoch. The
# former owner detects that its lease is lost, drops its fetched messages, and acquires the queue again at the new
# offset. If the handler of a message runs during the reset, the message may be handled again. Without an inbox, the
# message may then take effect twice.


@dataclass(frozen=True, slots=True)
class QueueReset:
    """The change that a reset made, or would make, to one queue."""

    topic: str
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
    """Return the position after a reset.

    The counters do not change. `moved` changes, so that `next_offset - start_offset - moved` keeps its value: the audit
    compares this value with the counters.
    """
    start = min(position.start_offset, target)
    counted = position.next_offset - position.start_offset - position.moved
    return replace(position, next_offset=target, start_offset=start, moved=target - start - counted)


def reset(
    run: Executor,
    group: str,
    topic: str,
    target: Start | datetime | int,
    *,
    reprocess: bool = False,
    dry_run: bool = False,
) -> Sequence[QueueReset]:
    """Move a group's offsets on a topic. Return the queues with old and new offset.

    Start.LATEST means the end of the queue. If `target` is a number and a queue has no message at this offset, the
    nearest existing offset of the queue is used. If offsets move back, the inbox skips the messages that the group
    receives again, unless `reprocess` raises the group's generation.

    With `dry_run`, it changes nothing. Raises UnknownGroup and UnknownTopic, and UsageError when the group does not
    consume the topic.
    """
    # Find the target offsets before the first lock, because the search for a time may read the whole topic.
    targets = _targets(run, topic, target)
    with run.connection.transaction():
        group_id = group_id_of(run, group)
        moves = _plan(run, group, topic, targets)
        if not dry_run and moves:
            targets = {move.queue_id: move.to_offset for move in moves}
            quarantine.forget_passed(run, group_id, targets)
            fenced = _fence(run, group_id, list(targets))
            offsets.place(run, [replace(one, position=moved_to(one.position, targets[one.key[1]])) for one in fenced])
            forget_sent_away(run, group_id, list(targets))
        if reprocess and not dry_run:
            raise_generation(run, group)
    if not dry_run:
        notify(run, Channel.SHARED)
    return moves


def skip(run: Executor, group: str, topic: str, message_id: UUID, *, dry_run: bool = False) -> QueueReset:
    """Move a group past the message that blocks one of its queues. Return the queue with old and new offset.

    The group then handles the next messages of the queue, also if an on_error policy has stopped the queue. With
    `dry_run`, it changes nothing. Raises UnknownGroup and UnknownTopic. Raises UsageError if the message does not block
    a queue of the group.
    """
    TopicCatalog(run.schema).get(run.connection, topic)
    with run.connection.transaction():
        group_id = group_id_of(run, group)
        queue = next((one for one in list_queues(run, group, topic) if one.blocked_by == message_id), None)
        if queue is None:
            raise _does_not_block(group, topic, message_id)
        target = max(queue.next_offset, queue.floor) + 1
        if not dry_run:
            quarantine.forget_passed(run, group_id, {queue.queue_id: target})
            [fenced] = _fence(run, group_id, [queue.queue_id])
            if fenced.position.next_offset != queue.next_offset:
                raise _does_not_block(group, topic, message_id)
            offsets.place(run, [replace(fenced, position=moved_to(fenced.position, target))])
    if not dry_run:
        notify(run, Channel.SHARED)
    return QueueReset(queue.topic, queue.number, queue.queue_id, queue.next_offset, target)


_PASSED_ENTRY = Statement("""
SELECT log.log_id, log.topic_id, entry.queue_id
FROM {schema}.commit_log log
JOIN {schema}.subscription ON subscription.topic_id = log.topic_id
JOIN {schema}.consumer_group USING (group_id)
JOIN {schema}.queue ON queue.topic_id = log.topic_id
JOIN {schema}.consume_queue entry ON entry.log_id = log.log_id AND entry.queue_id = queue.queue_id
WHERE log.message_id = %(message_id)s AND group_id = %(group_id)s AND NOT consumer_group.broadcast
""")
_DELIVER_AGAIN = Statement("""
WITH restored AS (
    UPDATE {schema}.dead_letter SET discarded_at = NULL WHERE group_id = %(group_id)s AND log_id = %(log_id)s
)
INSERT INTO {schema}.scheduled (log_id, due_at, queue_id, attempt) VALUES (%(log_id)s, now(), %(retry_queue)s, 0)
""")


def redeliver(
    run: Executor, group: str, message_id: UUID, *, forget: Callable[[], int] = lambda: 0, dry_run: bool = False
) -> int:
    """Deliver one message that a group has passed to this group again, through the group's retry queue.

    `forget` deletes what the group's inbox knows of the message, or the inbox would skip it, and returns the number of
    rows, which this function returns, too. It is called when it is certain that the group cannot receive the message
    otherwise. The counters say that a reset let the group read the entry again, and that the group sent it back. With
    `dry_run`, it changes nothing. Raises UnknownGroup, and UsageError if the group has not passed the message. The
    caller then sends a notification on Channel.DECIDED.
    """
    forgotten = 0
    with run.connection.transaction(force_rollback=dry_run):
        group_id = group_id_of(run, group)
        found = run.row(_PASSED_ENTRY, {"group_id": group_id, "message_id": message_id})
        if found is None:
            raise _not_passed(group, message_id, Whereabouts.GONE)
        log_id, topic_id, queue_id = found
        # A second call for the same message waits here.
        [fenced] = _fence(run, group_id, [queue_id])
        where = whereabouts(run, group, [message_id])[message_id]
        if where not in (Whereabouts.PASSED, Whereabouts.DISCARDED):
            raise _not_passed(group, message_id, where)
        position = fenced.position
        again = replace(position, sent_back=position.sent_back + 1, moved=position.moved - 1)
        offsets.place(run, [replace(fenced, position=again)])
        if not dry_run:
            forgotten = forget()
        retry_queue = ensure_retry_queue(run, group_id, topic_id)
        run.execute(_DELIVER_AGAIN, {"group_id": group_id, "log_id": log_id, "retry_queue": retry_queue})
    if not dry_run:
        notify(run, Channel.SHARED)
    return forgotten


_NOT_PASSED: Final = {
    Whereabouts.WAITING: "the group still gets it without this command. `outbox_group offsets` shows the group's lag",
    Whereabouts.DEAD: "it is a dead letter. Deliver it again with `outbox_dead_letter replay`",
    Whereabouts.GONE: "no queue of this group has it: it was not published or not committed, retention has removed it, "
    "or the group does not consume its topic or is a broadcast group. `outbox_message show` shows where it is",
}


def _not_passed(group: str, message_id: UUID, where: Whereabouts) -> UsageError:
    return UsageError(f"message {message_id} was not delivered again to group {group!r}, because {_NOT_PASSED[where]}.")


def _does_not_block(group: str, topic: str, message_id: UUID) -> UsageError:
    return UsageError(
        f"message {message_id} does not block a queue of group {group!r} on topic {topic!r}, so nothing was skipped: "
        f"the group has finished the message, or does not consume the topic in order. `outbox_group offsets {group}` "
        "lists the messages that block its queues."
    )


def _fence(run: Executor, group_id: int, queue_ids: Sequence[int]) -> list[OffsetRow]:
    """Fence the owners of the queues. Return the positions, which do not change any more, with the new epochs."""
    fenced = run.rows(_FENCE, {"group_id": group_id, "queue_ids": integers(queue_ids)})
    # After the fence, they include every position that the former owners have stored.
    positions = offsets.load(run, group_id, queue_ids)
    return [OffsetRow((group_id, queue_id), epoch, 0, positions[queue_id]) for queue_id, epoch in fenced]


def _targets(run: Executor, topic: str, target: Start | datetime | int) -> dict[int, int]:
    """Return the target offsets by queue id; one may still be greater than the end of its queue."""
    topic_id = TopicCatalog(run.schema).get(run.connection, topic).topic_id
    if isinstance(target, int):
        floors = starting_offsets(run, topic_id, Start.EARLIEST)
        return {queue_id: max(target, floor) for queue_id, floor in floors.items()}
    return starting_offsets(run, topic_id, target)


def _plan(run: Executor, group: str, topic: str, targets: Mapping[int, int]) -> list[QueueReset]:
    queues = [queue for queue in list_queues(run, group) if queue.topic == topic]
    if not queues:
        raise UsageError(
            f"group {group!r} does not consume topic {topic!r}, or is a broadcast group: it has no offsets to move. "
            "Check both names with `outbox_status`."
        )
    moves = [
        # If a queue was added after the targets were found, the group's position on this queue does not change.
        QueueReset(q.topic, q.number, q.queue_id, q.next_offset, min(targets[q.queue_id], q.head))
        for q in queues
        if q.queue_id in targets
    ]
    return [move for move in moves if move.to_offset != move.from_offset]
