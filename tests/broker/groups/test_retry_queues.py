"""Retry queues: one per group and topic, made at the first failure."""

from __future__ import annotations

import threading

import pytest

from outbox.broker.database.connection import BrokerConnection
from outbox.broker.database.executor import Executor
from outbox.broker.groups import registration
from outbox.broker.groups.redelivery import Redelivery, record_failure
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.audit import count_messages
from outbox.broker.postgres import PostgresBroker
from outbox.retry import MAX_ATTEMPTS
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench, keyed
from tests.broker.support import message
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


# -- messages that have left their queue: the count of their attempts, whose columns are smalli --


def test_a_message_without_a_limit_of_attempts_is_tried_again_after_the_last_one_that_is_counted(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    """Otherwise its failure could not be stored, and the process would fail with it again and again."""
    [receipt] = broker.send([message()])
    waiting = "SELECT attempt, due_at > now() + interval '1 hour' FROM outbox.scheduled"
    for attempt in (MAX_ATTEMPTS, 32_767):
        connection.execute(
            "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt) VALUES (%s, now(), 1, %s)",
            [receipt.position, attempt],
        )
        assert isinstance(receipt.position, int)
        place = Redelivery(receipt.position, 1, attempt)
        run = Executor(connection, "outbox")
        assert record_failure(run, 1, place, dead=False, attempts=attempt + 1, error="x", seconds=7200)
        assert connection.execute(waiting.encode()).fetchall() == [(MAX_ATTEMPTS, True)]
        connection.execute("DELETE FROM outbox.scheduled")
