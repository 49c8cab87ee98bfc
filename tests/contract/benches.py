"""One face for every broker, so that one suite can hold them all to the same protocol."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol

import psycopg

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import Sequencer
from outbox.broker.log.commit_log import append_decided
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.audit import count_messages
from outbox.broker.postgres import PostgresBroker
from outbox.memory import InMemoryBroker
from outbox.memory.consumers import InMemoryConsumers
from outbox.message import Message
from outbox.ports import AnyHandler, Broker, Consumers
from outbox.subscription import Subscription
from outbox.topic import Topic
from outbox.transaction import CheckSettings, Decision, EndTransaction, HalfTransaction
from tests.broker.support import let_time_pass

GROUP = "shop"
# Due at once: the suite calls check-back itself and never waits.
CHECKS = CheckSettings(immunity_seconds=0, recheck_seconds=0, max_checks=3)


class Bench(Protocol):
    """A broker with what a test needs around it."""

    @property
    def broker(self) -> Broker:
        """The broker under test."""

    def publish(self, messages: Sequence[Message], *, commit: bool) -> None:
        """Publish messages in one local transaction that commits or rolls back, and is reported."""

    def visible(self, topic: str) -> list[Message]:
        """The messages that consumers can see, after the broker did all it can do now."""

    def incidents(self) -> list[str]:
        """The incidents that the broker reported."""

    def let_time_pass(self, seconds: float) -> None:
        """Make what is stored so much older."""

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        """Add a consumer."""

    def drain(self) -> None:
        """Handle everything that is deliverable now."""

    def consumers(self, *wanted: tuple[Subscription, AnyHandler]) -> Consumers:
        """The engine's consumers of these subscriptions only."""

    def dead_letters(self, group: str) -> list[tuple[uuid.UUID, str]]:
        """Message ids given up by a group, with the last error."""

    def totals_differ(self) -> list[str]:
        """The equations of conservation that do not hold."""

    def close(self) -> None:
        """Release connections."""


def publish_two_phase(broker: Broker, messages: Sequence[Message], *, commit: bool) -> None:
    half = HalfTransaction(producer_group=GROUP, messages=messages)
    broker.send_half(half)
    decision = Decision.COMMIT if commit else Decision.ROLLBACK
    broker.end([EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group=GROUP)])


class MemoryBench:
    def __init__(self, topics: Sequence[Topic]) -> None:
        self.broker = InMemoryBroker(topics, auto_create_topics=False, check=CHECKS)

    def publish(self, messages: Sequence[Message], *, commit: bool) -> None:
        publish_two_phase(self.broker, messages, commit=commit)

    def visible(self, topic: str) -> list[Message]:
        return self.broker.visible(topic)

    def incidents(self) -> list[str]:
        return self.broker.incidents

    def let_time_pass(self, seconds: float) -> None:
        self.broker.advance(seconds)

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        self.broker.subscribe(subscription, handler)

    def drain(self) -> None:
        self.broker.drain()

    def consumers(self, *wanted: tuple[Subscription, AnyHandler]) -> Consumers:
        return InMemoryConsumers(self.broker.groups, wanted)

    def dead_letters(self, group: str) -> list[tuple[uuid.UUID, str]]:
        letters = [letter for letter in self.broker.dead_letters if letter.group == group]
        return [(letter.message.message_id, letter.errors[-1]) for letter in letters]

    def totals_differ(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class PostgresBench:
    """The PostgreSQL broker on the two-phase path."""

    def __init__(self, url: str, topics: Sequence[Topic]) -> None:
        self.database = BrokerDatabase(conninfo=url)
        self.broker = PostgresBroker(self.database, check=CHECKS)
        self.broker.declare(topics)
        self._connection = self.database.connect()
        self._sequencer = Sequencer(self.database, uuid.uuid4())
        self._subscriptions: list[tuple[Subscription, AnyHandler]] = []

    def publish(self, messages: Sequence[Message], *, commit: bool) -> None:
        publish_two_phase(self.broker, messages, commit=commit)

    def sequence(self) -> None:
        while True:
            counts = self._sequencer.run_once(self._connection)
            # A tick that met another leader, or a session without its prepared statements, has only read its position.
            if not counts.appended and not counts.collided:
                break

    def visible(self, topic: str) -> list[Message]:
        self.sequence()
        rows = self._connection.execute(
            """
            SELECT l.message_id, l.body, l.key, l.tag
            FROM outbox.consume_queue e
            JOIN outbox.queue q USING (queue_id)
            JOIN outbox.topic t USING (topic_id)
            JOIN outbox.commit_log l USING (log_id)
            WHERE t.name = %s
            ORDER BY q.layout, q.number, e.queue_offset
            """,
            [topic],
        ).fetchall()
        return [Message(topic=topic, message_id=row[0], body=row[1], key=row[2], tag=row[3]) for row in rows]

    def incidents(self) -> list[str]:
        rows = self._connection.execute("SELECT kind || ' ' || subject || ': ' || detail FROM outbox.incident")
        return [row[0] for row in rows]

    def let_time_pass(self, seconds: float) -> None:
        let_time_pass(self._connection, seconds)
        # The former leader has read the due messages by its clock.
        self._sequencer = Sequencer(self.database, uuid.uuid4())

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        self._subscriptions.append((subscription, handler))

    def drain(self) -> None:
        runtime = ConsumerRuntime(self.database, self._subscriptions)
        counts = runtime.run_once()
        while True:
            self.sequence()
            counts = runtime.run_once()
            if not any(vars(counts).values()):
                break

    def consumers(self, *wanted: tuple[Subscription, AnyHandler]) -> Consumers:
        return ConsumerRuntime(self.database, wanted)

    def dead_letters(self, group: str) -> list[tuple[uuid.UUID, str]]:
        rows = self._connection.execute(
            """
            SELECT l.message_id, d.error FROM outbox.dead_letter d
            JOIN outbox.commit_log l USING (log_id) JOIN outbox.consumer_group g USING (group_id)
            WHERE g.name = %s ORDER BY d.log_id
            """,
            [group],
        )
        return [(row[0], row[1]) for row in rows]

    def totals_differ(self) -> list[str]:
        return count_messages(Executor(self._connection, "outbox")).differences()

    def close(self) -> None:
        self._connection.close()
        self.broker.close()


class AtomicBench(PostgresBench):
    """The PostgreSQL broker on the atomic path: log row and decision in the local transaction."""

    def __init__(self, url: str, topics: Sequence[Topic]) -> None:
        super().__init__(url, topics)
        self._catalog = TopicCatalog("outbox")
        self._local = psycopg.connect(url, autocommit=True)

    def publish(self, messages: Sequence[Message], *, commit: bool) -> None:
        with self._local.transaction(force_rollback=not commit):
            run = Executor(self._local, "outbox")
            append_decided(run, self._catalog, messages, producer_group=GROUP, transactional=True)

    def close(self) -> None:
        self._local.close()
        super().close()
