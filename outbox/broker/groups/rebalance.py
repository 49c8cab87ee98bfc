"""Compute which instance of a group consumes which queue, with pure functions whose input all instances can read.

Every instance computes the whole assignment, and takes its own share. If two instances see different members for a
moment, both may want the same queue, but only one gets the lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.broker.groups.leases import QueueKey
from outbox.broker.groups.members import Member, QueueState


def share(me: UUID, members: Sequence[Member], queues: Sequence[QueueState]) -> set[QueueKey]:
    """Return the keys of the queues that the instance `me` should consume. All `queues` belong to one group.

    Only members that subscribe to a topic get the queues and the retry queue of that topic.
    """
    mine: set[QueueKey] = set()
    for topic in dict.fromkeys(queue.topic for queue in queues):
        of_topic = [queue for queue in queues if queue.topic == topic]
        if topic is None:
            owners = _owners_of_retries(members, of_topic)
        else:
            owners = _divided(_subscribers(members, topic), of_topic)
        mine.update(key for key, owner in owners.items() if owner == me)
    return mine


def _divided(instances: Sequence[UUID], queues: Sequence[QueueState]) -> dict[QueueKey, UUID]:
    """Give each instance a block of successive queues. The blocks of the first instances may have one queue more."""
    if not instances:
        return {}
    size, larger = divmod(len(queues), len(instances))
    owners = [instance for index, instance in enumerate(instances) for _ in range(size + (index < larger))]
    return {queue.key: owner for queue, owner in zip(queues, owners, strict=True)}


def _owners_of_retries(members: Sequence[Member], queues: Sequence[QueueState]) -> dict[QueueKey, UUID]:
    """Divide the retry queues of all topics together, because each topic has one, and few members would get them all.

    If the owner of a retry queue does not subscribe to the topic of the queue, the queue goes to a member that
    subscribes to this topic.
    """
    owners = _divided([member.instance_id for member in members], queues)
    for index, queue in enumerate(queues):
        able = _subscribers(members, queue.retried_topic)
        if queue.key in owners and owners[queue.key] not in able:
            owners.pop(queue.key)
            if able:
                owners[queue.key] = able[index % len(able)]
    return owners


def _subscribers(members: Sequence[Member], topic: str | None) -> list[UUID]:
    return [member.instance_id for member in members if topic in member.topics]
