"""Deleting groups, one subscription of a group, and topics. The messages that get lost are counted first."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.groups import registration
from outbox.broker.log.topics import TopicCatalog, declare_topics, list_topics
from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.deletion import Loss, TopicLoss, delete_group, delete_topic
from outbox.broker.operations.progress import list_queues
from outbox.errors import UnknownGroup, UnknownTopic, UsageError
from outbox.message import Message
from outbox.topic import Topic
from outbox.transaction import Decision, EndTransaction, HalfTransaction
from tests.broker.bench import NORMAL, ConsumptionBench
from tests.broker.operations.support import age, clean, consume, group_of, keys, publish, subscription, topic_id
from tests.support import eventually


@pytest.fixture
def shop(bench: ConsumptionBench) -> ConsumptionBench:
    """Two topics, a group that has read both and left something of each, and one that has not read."""
    for topic in ("orders", "points"):
        bench.declare(topic, queues=2)
        publish(bench, "good", "bad", "later", topic=topic)
        consume(bench, topic=topic)
        registration.register(bench.run, subscription("sleeper", topic))
    publish(bench, "new")
    return bench


def _tables(bench: ConsumptionBench) -> dict[str, int]:
    names = (
        "consumer_group", "subscription", "consumer", "queue_lease", "consumer_offset", "failure", "dead_letter",
        "finished_ahead", "scheduled", "queue", "topic",
    )  # fmt: skip
    return {name: int(bench.rows(f"SELECT count(*) FROM outbox.{name}")[0][0]) for name in names}


def test_deleting_and_a_new_life_of_the_server_lock_in_one_order(shop: ConsumptionBench) -> None:
    """A group without subscriptions, with rows of topics that it has left. A new life locks leases before offsets."""
    shop.connection.execute(
        "DELETE FROM outbox.subscription USING outbox.consumer_group g WHERE g.group_id = subscription.group_id"
        " AND g.name = 'g'"
    )
    with shop.database.connect() as beginning, shop.database.connect() as deleting:
        with beginning.transaction():
            beginning.execute("LOCK TABLE outbox.life, outbox.queue_lease IN SHARE ROW EXCLUSIVE MODE")
            thread = threading.Thread(target=delete_group, args=(Executor(deleting, "outbox"), "g"))
            thread.start()
            waits = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
            eventually(lambda: shop.rows(waits, beginning.info.backend_pid) == [(1,)])
            beginning.execute(
                "LOCK TABLE outbox.consumer_offset, outbox.finished_ahead IN SHARE ROW EXCLUSIVE MODE NOWAIT"
            )
        thread.join(20)
    assert shop.rows("SELECT count(*) FROM outbox.consumer_group WHERE name = 'g'") == [(0,)]


def test_a_group_goes_with_everything_it_had(shop: ConsumptionBench) -> None:
    before = _tables(shop)
    expected = [Loss("g", "orders", lag=1, retrying=0, dead=1), Loss("g", "points", lag=0, retrying=0, dead=1)]
    assert delete_group(shop.run, "g", dry_run=True) == expected
    assert _tables(shop) == before
    assert delete_group(shop.run, "g") == expected
    of_g = ("failure", "dead_letter", "finished_ahead", "scheduled")
    assert {name: count for name, count in _tables(shop).items() if name in of_g} == dict.fromkeys(of_g, 0)
    assert shop.rows("SELECT name FROM outbox.topic ORDER BY 1") == [("orders",), ("points",)], "no retry topic"
    assert list(count_messages(shop.run).groups) == ["sleeper"]
    with pytest.raises(UnknownGroup):
        delete_group(shop.run, "g")
    # Only the sleeping group delays retention now.
    delete_group(shop.run, "sleeper")
    # A group of that name starts again from the beginning.
    assert sorted(consume(shop)) == ["good", "later", "new"]
    assert group_of(shop).queued == 4


def test_one_subscription_of_a_group_goes_and_the_others_stay(shop: ConsumptionBench) -> None:
    assert delete_group(shop.run, "g", topic="points") == [Loss("g", "points", lag=0, retrying=0, dead=1)]
    group = group_of(shop)
    assert {queue.topic for queue in list_queues(shop.run, "g") if not queue.is_retry} == {"orders"}
    assert (group.queued, group.handled, group.dead, group.lag) == (4, 2, 1, 1)
    with pytest.raises(UsageError, match=r"no subscription to 'points'; it has: orders\."):
        delete_group(shop.run, "g", topic="points")
    assert consume(shop) == ["new"]


def test_what_waits_for_a_retry_is_counted_and_goes(shop: ConsumptionBench) -> None:
    shop.connection.execute(
        "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
        " SELECT log_id, now(), queue_id, 7 FROM outbox.commit_log, outbox.queue"
        " WHERE key = 'good' AND commit_log.topic_id = queue.number"
        " AND queue.topic_id IN (SELECT topic_id FROM outbox.topic WHERE retry_of IS NOT NULL)"
    )
    losses = delete_group(shop.run, "g")
    assert [(loss.topic, loss.retrying) for loss in losses] == [("orders", 1), ("points", 1)]
    shop.sequence()
    assert shop.rows("SELECT count(*) FROM outbox.consume_queue WHERE attempt = 7") == [(0,)]


def test_live_consumers_are_not_deleted_under_their_feet(shop: ConsumptionBench) -> None:
    with shop.running((subscription(), lambda _: None)):
        eventually(lambda: shop.members() == 1)
        with pytest.raises(UsageError, match=r"1 consumers are alive: 'g' on .* \(pid \d+\)"):
            delete_group(shop.run, "g")
        with pytest.raises(UsageError, match="are alive"):
            delete_topic(shop.run, "orders")
        # It consumes orders alone.
        assert delete_group(shop.run, "g", topic="points", dry_run=True)
        assert delete_topic(shop.run, "points", dry_run=True).groups
    delete_group(shop.run, "g")


def test_a_consumer_that_joins_while_its_group_is_deleted_creates_it_again(shop: ConsumptionBench) -> None:
    found: list[registration.Registration] = []

    def join() -> None:
        with shop.database.connect() as connection:
            found.append(registration.register(Executor(connection, "outbox"), subscription()))

    thread = threading.Thread(target=join)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%consumer_group%'"
    with shop.database.connect() as deleting:
        with deleting.transaction():
            delete_group(Executor(deleting, "outbox"), "g")
            thread.start()
            eventually(lambda: shop.rows(waiting) == [(1,)], what="it waits for the group's row")
    thread.join(20)
    (made,) = shop.rows("SELECT group_id FROM outbox.consumer_group WHERE name = 'g'")
    assert [(one.group_id,) for one in found] == [made]


def test_a_topic_goes_with_its_subscriptions_and_retention_takes_its_messages(shop: ConsumptionBench) -> None:
    half = HalfTransaction(producer_group="shop", messages=[Message(topic="orders", key="late", body=b"{}")])
    shop.broker.send_half(half)
    shop.broker.send([Message(topic="orders", key="delayed", body=b"{}", delay=timedelta(hours=1))])
    shop.broker.claim_checks("nobody")
    shop.sequence()
    expected = TopicLoss(
        "orders",
        undelivered=2,
        groups=[Loss("g", "orders", lag=1, retrying=0, dead=1), Loss("sleeper", "orders", lag=4, retrying=0, dead=0)],
    )
    assert delete_topic(shop.run, "orders", dry_run=True) == expected
    assert delete_topic(shop.run, "orders") == expected
    assert [topic.name for topic in list_topics(shop.run)] == ["points"]
    with pytest.raises(UnknownTopic):
        TopicCatalog("outbox").get(shop.connection, "orders")
    clean(shop)
    assert "new" in keys(shop), "for two hours, in which a ledger has its transaction"
    age(shop, 1 / 8)
    clean(shop)
    assert keys(shop) == ["bad", "delayed", "good", "late", "later"], "of points, and what is in no queue yet"
    # No message is lost: one that is decided now is queued, and is removed after its retention time.
    shop.broker.end(
        [EndTransaction(transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group="shop")]
    )
    shop.sequence()
    clean(shop)
    assert "late" in keys(shop)
    age(shop, 4)
    clean(shop)
    assert "late" not in keys(shop)
    assert count_messages(shop.run).differences() == []


def test_a_deleted_topic_comes_back_when_it_is_declared(shop: ConsumptionBench) -> None:
    known = topic_id(shop, "orders")
    delete_topic(shop.run, "orders")
    declare_topics(shop.run, [Topic(name="orders", types=NORMAL, queue_count=2)])
    assert topic_id(shop, "orders") == known
    publish(shop, "again")
    assert "again" in consume(shop, "fresh")
