"""Retry queues: one per group and topic, made at the first failure."""

from __future__ import annotations

import threading
import uuid

import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.groups import rebalance, registration
from outbox.broker.groups.members import Member, QueueState
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.audit import count_messages
from outbox.message import Message
from outbox.subscription import Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench, keyed
from tests.support import eventually


def _differences(bench: ConsumptionBench) -> list[str]:
    return count_messages(bench.run).differences()


def _topic_id(bench: ConsumptionBench, topic: str) -> int:
    return TopicCatalog("outbox").get(bench.connection, topic).topic_id


@pytest.mark.slow
def test_processes_of_a_group_with_different_topics_each_retry_their_own(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    bench.declare("points", queues=1)
    processes = [bench.spawn(topic, topic=topic, fail=2) for topic in ("orders", "points")]
    eventually(lambda: bench.members() == 2)
    with bench.sequencing():
        bench.publish([*keyed("orders", 20, 5), *keyed("points", 20, 5)])
        eventually(lambda: bench.effect_count() == 40 and bench.retrying() == 0)
        eventually(lambda: bench.lag("g") == 0)
    for process in processes:
        assert bench.stop(process) == 0
    handled = bench.rows(
        "SELECT instance, count(DISTINCT message_id) FROM effect JOIN outbox.commit_log USING (message_id)"
        " JOIN outbox.topic USING (topic_id) WHERE instance = name AND attempt = 3 GROUP BY instance ORDER BY instance"
    )
    assert handled == [("orders", 20), ("points", 20)]
    assert _differences(bench) == []


def test_made_by_many_at_once_there_is_one(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    group_id = registration.register(bench.run, Subscription(group="g", topic="orders")).group_id
    topic_id = _topic_id(bench, "orders")
    made: list[int] = []
    together = threading.Barrier(6)

    def make() -> None:
        with bench.database.connect() as connection:
            together.wait(20)
            made.append(registration.ensure_retry_queue(Executor(connection, "outbox"), group_id, topic_id))

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 6 and len(set(made)) == 1
    assert bench.rows("SELECT number, queue_id FROM outbox.queue WHERE queue_id = %s", made[0]) == [(topic_id, made[0])]


def test_a_group_without_failures_has_none(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    bench.publish([Message(topic="orders", body=b"{}")])
    subscription = Subscription(group="g", topic="orders", retry=AT_ONCE)
    bench.run_until_idle(subscription, lambda _: None)
    assert bench.rows("SELECT count(*) FROM outbox.topic WHERE retry_of IS NOT NULL") == [(0,)]


def _retry_queue(queue_id: int, topic: str) -> QueueState:
    return QueueState(1, queue_id, None, queue_id, None, 0, True, None, topic)


def test_a_retry_queue_goes_to_a_member_that_knows_its_topic() -> None:
    a, b, c = (uuid.UUID(int=n) for n in (1, 2, 3))
    queues = [_retry_queue(1, "orders"), _retry_queue(2, "points"), _retry_queue(3, "nobody's")]

    def shares(*members: Member) -> list[list[int]]:
        every = sorted(members, key=lambda member: member.instance_id)
        return [sorted(number for _, number in rebalance.share(member.instance_id, every, queues)) for member in every]

    both = frozenset({"orders", "points"})
    assert shares(Member(a, frozenset({"orders"})), Member(b, frozenset({"points"}))) == [[1], [2]]
    assert shares(Member(a, both), Member(b, both)) == [[1, 2], []]
    assert shares(Member(a, both), Member(b, frozenset({"orders"})), Member(c, frozenset({"points"}))) == [[1], [], [2]]
