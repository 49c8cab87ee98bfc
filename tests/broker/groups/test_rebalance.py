"""Sharing queues: the assignment as pure functions, leases as rows."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from outbox.broker.groups import leases, offsets, rebalance
from outbox.broker.groups.leases import Lease
from outbox.broker.groups.members import Member, QueueState
from outbox.broker.groups.offsets import OffsetRow, Position
from tests.broker.bench import ConsumptionBench
from tests.support import eventually

LIFE = uuid.UUID(int=0)
INSTANCES = [uuid.UUID(int=n + 1) for n in range(8)]


def members(count: int, topics: Iterable[str] = ("orders",)) -> list[Member]:
    return [Member(instance, frozenset(topics)) for instance in INSTANCES[:count]]


def queues(count: int, topic: str = "orders", first: int = 0) -> list[QueueState]:
    return [QueueState(1, first + n, topic, n, None, 0, True, None) for n in range(count)]


def retry_queue(topic: str, queue_id: int) -> QueueState:
    return QueueState(1, queue_id, None, 7, None, 0, True, None, topic)


def shares(member_count: int, queue_count: int) -> list[set[tuple[int, int]]]:
    every = members(member_count)
    return [rebalance.share(m.instance_id, every, queues(queue_count)) for m in every]


@given(member_count=st.integers(1, 8), queue_count=st.integers(0, 40))
def test_every_queue_goes_to_exactly_one_member(member_count: int, queue_count: int) -> None:
    found = shares(member_count, queue_count)
    assert Counter(key for share in found for key in share) == Counter(queue.key for queue in queues(queue_count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_members_get_adjacent_queues() -> None:
    assert [sorted(q for _, q in share) for share in shares(2, 5)] == [[0, 1, 2], [3, 4]]


def test_queues_go_to_members_that_subscribe_to_their_topic() -> None:
    mixed = [*members(1), Member(INSTANCES[1], frozenset({"orders", "bills"}))]
    every = [*queues(4), *queues(2, "bills", first=10), retry_queue("bills", 20)]
    first = rebalance.share(INSTANCES[0], mixed, every)
    second = rebalance.share(INSTANCES[1], mixed, every)
    assert first == {(1, 0), (1, 1)}
    assert second == {(1, 2), (1, 3), (1, 10), (1, 11), (1, 20)}


# -- leases -----------------------------------------------------------------------------------------

A, B = INSTANCES[0], INSTANCES[1]


def acquire(bench: ConsumptionBench, owner: uuid.UUID, *queue_ids: int, term: float = 30.0) -> list[Lease]:
    return leases.acquire(bench.run, owner, 1, queue_ids, life=LIFE, term_seconds=term)


def test_a_live_lease_is_left_alone(bench: ConsumptionBench) -> None:
    held = acquire(bench, A, 1, 2)
    assert [(lease.key, lease.epoch) for lease in held] == [((1, 1), 1), ((1, 2), 1)]
    assert [lease.key for lease in acquire(bench, B, 1, 2, 3)] == [(1, 3)]


def test_every_change_of_owner_raises_the_epoch(bench: ConsumptionBench) -> None:
    (first,) = acquire(bench, A, 1)
    assert leases.release(bench.run, A, [first]) == 1
    (second,) = acquire(bench, B, 1, term=0.05)
    (third,) = eventually(lambda: acquire(bench, A, 1))
    assert [first.epoch, second.epoch, third.epoch] == [1, 2, 3]
    # A former owner changes nothing.
    assert leases.release(bench.run, A, [first]) == 0
    assert leases.renew(bench.run, B, [second], term_seconds=30) == set()


def test_renewal_counts_from_before_it_was_sent(bench: ConsumptionBench) -> None:
    (lease,) = acquire(bench, A, 1, term=0.2)
    before = leases.lease_clock()
    assert leases.renew(bench.run, A, [lease], term_seconds=30) == {(1, 1)}
    after = leases.lease_clock()
    assert before + 30 <= lease.trusted_until <= after + 30
    assert lease.trusted()
    assert not Lease((1, 1), 1, before, LIFE).trusted()


def test_a_fenced_former_owner_stores_no_offset(bench: ConsumptionBench) -> None:
    (old,) = acquire(bench, A, 1, term=0.05)
    (new,) = eventually(lambda: acquire(bench, B, 1))

    def store(owner: uuid.UUID, lease: Lease, offset: int) -> set[tuple[int, int]]:
        row = OffsetRow(lease.key, lease.epoch, offset, Position(offset, 0, handled=offset))
        return offsets.store(bench.run, owner, [row])

    assert store(A, old, 9) == set()
    assert store(B, new, 3) == {(1, 1)}
    assert offsets.load(bench.run, 1, [1])[1].next_offset == 3


def test_an_offset_of_an_older_epoch_never_wins_however_late(bench: ConsumptionBench) -> None:
    """Stored behind the fence's back, as by a statement that began before the lease changed hands."""
    insert = (
        "INSERT INTO outbox.consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset)"
        " VALUES (1, 1, %s, %s, %s, 0)"
    )
    for epoch, ordinal, next_offset in [(1, 1, 5), (2, 1, 6), (1, 99, 500)]:
        bench.connection.execute(insert, [epoch, ordinal, next_offset])
    assert offsets.load(bench.run, 1, [1])[1].next_offset == 6
