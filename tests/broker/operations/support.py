"""Shared helpers of the tests of operator actions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from outbox.broker.database.executor import Executor, Row
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.maintenance import retention
from outbox.broker.maintenance.retention import RetentionCounts, RetentionSettings
from outbox.broker.operations.audit import count_messages
from outbox.errors import PermanentError
from outbox.message import Delivery, Message
from outbox.subscription import Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench, encode


def publish(bench: ConsumptionBench, *keys: str, topic: str = "orders", tag: str = "") -> list[Message]:
    """One message per key, each in a transaction of its own, sequenced."""
    messages = [Message(topic=topic, key=key, tag=tag, body=encode({})) for key in keys]
    for message in messages:
        bench.broker.send([message])
    bench.sequence()
    return messages


def subscription(group: str = "g", topic: str = "orders", *, only: str = "") -> Subscription:
    """A subscription whose retries are due at once."""
    return Subscription(group=group, topic=topic, filter=only, retry=AT_ONCE)


def consume(bench: ConsumptionBench, group: str = "g", topic: str = "orders", *, only: str = "") -> list[str]:
    """Consume until nothing is left; the keys handled. Keys that begin with "bad" are given up, "later" fails once."""
    handled: list[str] = []

    def handle(delivery: Delivery) -> None:
        if delivery.key.startswith("bad type"):
            raise TypeError("no such type")
        if delivery.key.startswith("bad"):
            raise PermanentError(f"Cannot ever work: {delivery.key}")
        if delivery.key.startswith("later") and delivery.attempt == 1:
            raise ValueError("once")
        handled.append(delivery.key)

    bench.run_until_idle(subscription(group, topic, only=only), handle)
    return handled


def group_of(bench: ConsumptionBench, name: str = "g") -> Row:
    """A group's numbers, which must add up."""
    counted = count_messages(bench.run)
    assert counted.differences() == []
    return counted.groups[name]


def age(bench: ConsumptionBench, days: float) -> None:
    """Let everything be that much older."""
    for table, column in (
        ("commit_log", "stored_at"),
        ("consume_queue", "queued_at"),
        ("op_log", "decided_at"),
        ("topic", "deleted_at"),
    ):
        statement = f"UPDATE outbox.{table} SET {column} = {column} - %s"
        bench.connection.execute(statement.encode(), [timedelta(days=days)])


def clean(bench: ConsumptionBench, *, batch: int = 5_000) -> list[RetentionCounts]:
    """Retention until it has nothing more to do."""
    run = Executor(bench.connection, "outbox")
    passes = [retention.run_once(run, settings=RetentionSettings(batch=batch))]
    while passes[-1].more:
        assert len(passes) < 100
        passes.append(retention.run_once(run, settings=RetentionSettings(batch=batch)))
    return passes


def topic_id(bench: ConsumptionBench, topic: str) -> int:
    """A topic's id."""
    return TopicCatalog("outbox").get(bench.connection, topic).topic_id


def keys(bench: ConsumptionBench) -> Sequence[str]:
    """The keys of all stored messages, sorted."""
    return [row[0] for row in bench.rows("SELECT key FROM outbox.commit_log ORDER BY key")]
