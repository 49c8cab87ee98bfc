"""Limits of topics: publishing is refused or warned about while a group is too far behind, and only then."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from outbox import Delivery
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.broker.log import topics
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.operations import summary
from outbox.broker.operations.conditions import Severity
from outbox.broker.operations.rules import survey
from outbox.broker.postgres import PostgresBroker
from outbox.errors import TopicOverLimit
from outbox.subscription import Subscription
from outbox.topic import Topic
from tests.broker.bench import ConsumptionBench, keyed
from tests.broker.support import half, message, new_sequencer, wire

LIMITED = Topic(name="orders", backlog_limit=10, queue_count=1)


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers read the topics again at each call, so that the tests need not wait."""
    monkeypatch.setattr(topics, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(topics, "_RECHECK_SECONDS", 0.0)


@pytest.fixture
def run(connection: BrokerConnection) -> Executor:
    declare_topics(Executor(connection, "outbox"), [LIMITED])
    run = Executor(connection, "outbox")
    register(run, Subscription(topic="orders", group="billing"))
    return run


def count(run: Executor, database: BrokerDatabase) -> None:
    """One tick, and one count of the leader."""
    new_sequencer(database).run_once(run.connection)
    summary.run_once(database)


def publish(broker: PostgresBroker, number: int) -> None:
    broker.send([message() for _ in range(number)])


def move(run: Executor, position: int) -> None:
    """The group has handled everything before `position`."""
    run.connection.execute(
        "INSERT INTO outbox.consumer_offset (next_offset, epoch, ordinal, handled, start_offset, group_id, queue_id)"
        " SELECT %(at)s, epoch, ordinal + 1, %(at)s, start_offset, group_id, queue_id FROM outbox.consumer_offset"
        " ORDER BY epoch DESC, ordinal DESC LIMIT 1",
        {"at": position},
    )


def conditions(run: Executor) -> list[tuple[Severity, Any]]:
    found = survey(run).verdict.conditions
    return [(one.severity, one.evidence[0]["measure"]) for one in found if one.name == "topic_limit"]


def test_the_states_of_a_limit(run: Executor, database: BrokerDatabase, broker: PostgresBroker) -> None:
    publish(broker, 7)
    count(run, database)
    assert conditions(run) == []
    publish(broker, 1)
    count(run, database)
    assert conditions(run) == [(Severity.WARNING, "backlog")]
    publish(broker, 3)
    count(run, database)
    assert conditions(run) == [(Severity.CRITICAL, "backlog")]
    with pytest.raises(TopicOverLimit, match="topic 'orders' takes no messages now: group 'billing' is more than"):
        publish(broker, 1)
    with pytest.raises(TopicOverLimit):
        broker.send_half(half())
    broker.send([message("plain")])
    move(run, 2)
    count(run, database)
    with pytest.raises(TopicOverLimit):
        publish(broker, 1)
    assert conditions(run) == [(Severity.CRITICAL, "backlog")]
    move(run, 3)
    count(run, database)
    assert conditions(run) == [(Severity.WARNING, "backlog")]
    publish(broker, 1)
    assert run.connection.execute("SELECT count(*) FROM outbox.commit_log").fetchall() == [(13,)]


def test_publish_in_sql_is_refused_too(run: Executor, database: BrokerDatabase, broker: PostgresBroker) -> None:
    publish(broker, 11)
    count(run, database)
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match="group 'billing' is more than"):
        run.connection.execute("SELECT outbox.publish('orders', '{}')")
    declare_topics(run, [replace(LIMITED, on_limit="warn")])
    run.connection.execute("SELECT outbox.publish('orders', '{}')")


def test_a_warning_instead(
    run: Executor, database: BrokerDatabase, broker: PostgresBroker, caplog: pytest.LogCaptureFixture
) -> None:
    declare_topics(run, [replace(LIMITED, on_limit="warn")])
    publish(broker, 11)
    count(run, database)
    assert conditions(run) == [(Severity.WARNING, "backlog")]
    with caplog.at_level(logging.WARNING, logger="outbox.broker.log.topics"):
        publish(broker, 1)
    [said] = [one.getMessage() for one in caplog.records if one.name == "outbox.broker.log.topics"]
    assert said.startswith("topic 'orders' is over its limit, and still takes messages: group 'billing' is more than")


def test_what_is_not_refused(bench: ConsumptionBench, database: BrokerDatabase) -> None:
    """A handler that publishes to the topic that its own group is behind on, and a repair."""
    declare_topics(bench.run, [LIMITED])
    register(bench.run, Subscription(topic="orders", group="billing"))
    bench.publish(keyed("orders", 11, 1))
    count(bench.run, bench.database)
    with contextlib.closing(PostgresBroker(bench.database)) as broker:
        with pytest.raises(TopicOverLimit):
            broker.send([message()])
        broker.send([message()], committed=True)
        seen: list[Delivery] = []

        def again(delivery: Delivery) -> None:
            if delivery.message.body == b'{"n": 0}':
                broker.send([message()])
            seen.append(delivery)

        bench.run_until_idle(Subscription(topic="orders", group="billing"), again)
    assert len(seen) == 13


def test_without_a_leader_the_messages_since_the_last_count_are_the_backlog(
    run: Executor, database: BrokerDatabase, broker: PostgresBroker
) -> None:
    """All workers are away, so no process counts."""
    summary.run_once(database)
    publish(broker, 11)
    publish(broker, 1)
    run.connection.execute("UPDATE outbox.summary SET at = at - interval '2 minutes'")
    with pytest.raises(TopicOverLimit, match="no process leads, and 12 messages were stored since"):
        publish(broker, 1)
    assert conditions(run) == [(Severity.CRITICAL, "uncounted")]
    count(run, database)
    with pytest.raises(TopicOverLimit, match="group 'billing' is more than"):
        publish(broker, 1)
    move(run, 12)
    count(run, database)
    publish(broker, 1)


def test_without_a_leader_publish_in_sql_is_refused_too(
    run: Executor, database: BrokerDatabase, broker: PostgresBroker
) -> None:
    summary.run_once(database)
    publish(broker, 11)
    statement = "SELECT outbox.publish('orders', '{}')"
    run.connection.execute(statement)
    run.connection.execute("UPDATE outbox.summary SET at = at - interval '2 minutes'")
    says = r"no process leads, and 12 messages .* last counted \(the limit is 10\). Start a worker"
    with pytest.raises(TopicOverLimit, match=says):
        publish(broker, 1)
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match=says):
        run.connection.execute(statement)
    declare_topics(run, [replace(LIMITED, on_limit="warn")])
    run.connection.execute(statement)


def test_a_topic_within_its_limits_costs_a_publisher_nothing(
    run: Executor, database: BrokerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog reads the topics once in thirty seconds, limited or not."""
    monkeypatch.setattr(topics, "_REFRESH_SECONDS", 30.0)
    catalog = TopicCatalog("outbox")
    with wire(run.connection) as sent:
        for _ in range(5):
            catalog.prepare(run.connection, [message()], transactional=False)
    assert sent.statements == 1
