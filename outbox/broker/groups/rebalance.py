"""Compute which instance of a group consumes which queue, with pure functions whose input all instances can read.

Every instance computes the whole assignment from the same members and queues, and takes its own share. So the group
needs no central coordinator. If two instances see different members for a moment, both may want the same queue. Only
one of these two instances gets the lease, so correctness does not depend on the assignment.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Collection, Sequence
from uuid import UUID

from outbox.broker.groups.leases import QueueKey
from outbox.broker.groups.members import Member, QueueState
from outbox.errors import ConfigurationError

Strategy = Callable[[Sequence[UUID], Sequence[QueueState]], "dict[QueueKey, UUID]"]
"""A function that gets the sorted instances and the sorted queues of one topic, and returns the owner of each queue.

If a queue is missing in the result, no instance consumes it.
"""

_VIRTUAL_NODES = 64


def averagely(instances: Sequence[UUID], queues: Sequence[QueueState]) -> dict[QueueKey, UUID]:
    """Give each instance a block of successive queues. The blocks of the first instances may have one queue more."""
    size, larger = divmod(len(queues), len(instances))
    owners = [instance for index, instance in enumerate(instances) for _ in range(size + (index < larger))]
    return {queue.key: owner for queue, owner in zip(queues, owners, strict=True)}


def circle(instances: Sequence[UUID], queues: Sequence[QueueState]) -> dict[QueueKey, UUID]:
    """Give the queues to the instances one by one, in turn."""
    return {queue.key: instances[index % len(instances)] for index, queue in enumerate(queues)}


def consistent_hash(instances: Sequence[UUID], queues: Sequence[QueueState]) -> dict[QueueKey, UUID]:
    """Use a hash ring: few queues change their owner when an instance joins or leaves, but the shares are uneven."""
    ring = sorted((_hash(f"{instance}#{node}"), instance) for instance in instances for node in range(_VIRTUAL_NODES))
    points = [point for point, _ in ring]
    return {
        queue.key: ring[bisect.bisect(points, _hash(f"{queue.key[0]}/{queue.key[1]}")) % len(ring)][1]
        for queue in queues
    }


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def by_name(name: str) -> Strategy | Collection[int]:
    """Return the strategy for a setting: averagely, circle, consistent_hash, or `config:0,2,5`.

    `config` lists the numbers of the queues that this process consumes, for every topic. Each process of the group
    needs a list of its own, and no queue number should be in two lists. With `config`, the retry queues are divided by
    `averagely`. Raises ConfigurationError.
    """
    strategies: dict[str, Strategy] = {
        "averagely": averagely,
        "circle": circle,
        "consistent_hash": consistent_hash,
    }
    if name in strategies:
        return strategies[name]
    kind, _, listed = name.partition(":")
    if kind == "config" and all(part.strip().isdigit() for part in listed.split(",")):
        return frozenset(int(part) for part in listed.split(","))
    raise ConfigurationError(
        f"rebalance strategy {name!r} does not exist: use {', '.join(strategies)} or config:NUMBER,NUMBER."
    )


def share(
    me: UUID, strategy: Strategy | Collection[int], members: Sequence[Member], queues: Sequence[QueueState]
) -> set[QueueKey]:
    """Return the keys of the queues that the instance `me` should consume. All `queues` belong to one group.

    Only members that subscribe to a topic get the queues and the retry queue of that topic.
    """
    mine: set[QueueKey] = set()
    for topic in dict.fromkeys(queue.topic for queue in queues):
        of_topic = [queue for queue in queues if queue.topic == topic]
        able = _able(members, topic)
        if topic is None:
            owners = _owners_of_retries(strategy if callable(strategy) else averagely, members, of_topic)
            mine.update(key for key, owner in owners.items() if owner == me)
        elif callable(strategy):
            owners = strategy(able, of_topic) if able else {}
            mine.update(key for key, owner in owners.items() if owner == me)
        elif me in able:
            mine.update(queue.key for queue in of_topic if queue.number in strategy)
    return mine


def _owners_of_retries(
    assign: Strategy, members: Sequence[Member], queues: Sequence[QueueState]
) -> dict[QueueKey, UUID]:
    """Divide the retry queues of all topics together, because each topic has one, and few members would get them all.

    If the owner of a retry queue does not subscribe to the topic of the queue, the queue goes to a member that
    subscribes to this topic.
    """
    owners = assign([member.instance_id for member in members], queues) if members else {}
    for index, queue in enumerate(queues):
        able = _able(members, queue.retried_topic)
        if queue.key in owners and owners[queue.key] not in able:
            owners.pop(queue.key)
            if able:
                owners[queue.key] = able[index % len(able)]
    return owners


def _able(members: Sequence[Member], topic: str | None) -> list[UUID]:
    return [member.instance_id for member in members if topic in member.topics]
