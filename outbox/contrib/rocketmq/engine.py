"""The engine of Apache RocketMQ.

The client library is an optional dependency, so it is imported inside the functions that use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

from django.core.checks import CheckMessage, Error, Warning
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.contrib.django.engine.engine import Engine, StoredRows
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker, ledger_aliases
from outbox.contrib.django.publishing.publish import lock_keys
from outbox.contrib.django.settings.conf import refused_settings_of_parts
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.contrib.rocketmq import dead_letter_notes, relay_rows
from outbox.errors import ConfigurationError, UsageError
from outbox.message import Message
from outbox.ports import AnyHandler, Consumers, LeftoverWork
from outbox.recall import Recall, RecallStatus
from outbox.refusals import Refusals
from outbox.rocketmq import declarations
from outbox.rocketmq.admin import brokers_of, parse_address
from outbox.rocketmq.inspection import Timers, left, missing
from outbox.rocketmq.stranded import waiting
from outbox.subscription import Subscription
from outbox.topic import Topic
from outbox.utils import heartbeat

if TYPE_CHECKING:
    from outbox.rocketmq.broker import RocketMQBroker

# A worker compares the topics before it starts its work, so a broker that does not answer delays this start.
_ANSWER_SECONDS: Final = 5.0


class RocketMQEngine(Engine):
    """The engine for OUTBOX['BROKER'] = 'rocketmq://PROXY:8081?brokers=BROKER:10911'.

    A worker runs no broker process, because RocketMQ is the broker.
    """

    refusals: ClassVar[Refusals] = declarations.REFUSALS
    has_broker_process: ClassVar[bool] = False
    pass_names: ClassVar[Sequence[str]] = ("exhausted_checks", "unasked_checks")

    @cached_property
    def broker(self) -> RocketMQBroker:
        from outbox.rocketmq.broker import RocketMQBroker
        from outbox.rocketmq.producer import AnsweringThread

        settings = self.settings
        return RocketMQBroker(
            settings.broker,
            [declared.topic for declared in settings.topics.values()],
            check=settings.check,
            timeout_seconds=settings.send_timeout_seconds,
            answering=lambda producer: AnsweringThread(
                producer, lambda: self.broker, settings.producer_group, LedgerChecker
            ),
        )

    def check(self) -> Iterator[CheckMessage]:
        try:
            refused = list(self.refused())
            names_brokers = bool(brokers_of(self.settings.broker))
        except ConfigurationError as error:
            refused, names_brokers = [str(error)], True
        for text in refused:
            yield Error(text, id="outbox.E031")
        if not names_brokers:
            yield Warning(
                "OUTBOX['BROKER'] names no broker of RocketMQ, only its proxy: the transactions that RocketMQ gave up "
                "cannot be read, so a committed message may stay undelivered.",
                hint="Append the administration port (listenPort, 10911) of every broker: "
                "'rocketmq://PROXY:8081?brokers=BROKER:10911,BROKER:10911'.",
                id="outbox.W033",
            )

    def refused(self) -> Iterator[str]:
        from outbox.rocketmq.client import configuration

        settings = self.settings
        configuration(settings.broker)
        if not settings.producer_group:
            yield "OUTBOX['PRODUCER_GROUP'] is not set: RocketMQ asks this group for outcomes of transactions. Set it."
        for declared in settings.topics.values():
            yield from self.refusals.of_topic(declared.topic)
        for item in subscribers():
            declared_topic = settings.topics.get(item.subscription.topic)
            topic = None if declared_topic is None else declared_topic.topic
            yield from self.refusals.of_subscription(item.subscription, topic, inbox=item.idempotent)
        yield from refused_settings_of_parts()
        yield from declarations.collisions(settings.topics)
        yield from declarations.collisions({item.subscription.group for item in subscribers()})
        yield from _mixed_groups()

    def consumers(self, wanted: Sequence[tuple[Subscription, AnyHandler]], *, leads: bool = False) -> Consumers:
        from outbox.rocketmq.consumer import RocketMQConsumers

        settings = self.settings
        self.require()
        return RocketMQConsumers(
            settings.broker,
            wanted,
            topics=[declared.topic for declared in settings.topics.values()],
            invoker=InboxInvoker(lease_seconds=self._lease_seconds, masked_fields=settings.masked_fields),
            codecs=self.codecs,
            on_tick=lambda: heartbeat.beat(ready=self.is_asked()),
            note=dead_letter_notes.note,
        )

    @property
    def _lease_seconds(self) -> float:
        """The lease of a handler's transaction, which may be idle for four fifths of it.

        While a handler publishes, its transaction is idle until RocketMQ answers. If a send could take longer than the
        transaction may be idle, PostgreSQL would end the transaction while a replica is promoted.
        """
        return max(self.settings.lease_seconds, 2 * self.settings.send_timeout_seconds)

    def run_pass(self, name: str) -> Mapping[str, Any]:
        """Decide, by the ledger, the transactions that RocketMQ gave up, or about which it reaches no producer.

        If two processes run this pass at the same time, they publish messages twice. The inbox then removes the
        duplicates. Returns the counts. Raises BrokerError.
        """
        settle = self.broker.settle_unasked if name == "unasked_checks" else self.broker.settle_exhausted
        return asdict(settle(self.settings.required_producer_group(), LedgerChecker()))

    def is_asked(self) -> bool:
        return not self.broker.unrouted()

    def needs_relay(self) -> bool:
        """Whether a declared topic has messages that wait for the relay."""
        return any(declarations.has_relayed(declared.topic) for declared in self.settings.topics.values())

    def store_rows(self, connection: BaseDatabaseWrapper, messages: Sequence[Message]) -> StoredRows | None:
        """Store the messages with an order or a delivery time for the relay."""
        relayed = [item for item in messages if self.broker.check_relayed(item)]
        if not relayed:
            return None
        topics = [self._topic(item.topic) for item in relayed]
        lock_keys(
            connection,
            [
                (item.topic, item.key)
                for topic, item in zip(topics, relayed, strict=True)
                if topic.is_fifo and topic.key_lock
            ],
        )
        # The receipts of a publish call name one transaction. If it also has a half message, that is the half's.
        ids = {item.message_id for item in relayed}
        first = next((item for item in messages if item.message_id not in ids), relayed[0])
        ordered = [topic.is_fifo for topic in topics]
        receipts = relay_rows.store(connection, relayed, ordered, transaction_id=first.message_id)
        return StoredRows(
            {one.message_id: one for one in receipts},
            lambda: relay_rows.is_stored(connection, relayed[0].message_id),
        )

    def _topic(self, name: str) -> Topic:
        declared = self.settings.topics.get(name)
        return self.broker.topic(name) if declared is None else declared.topic

    def recall_row(self, message_id: UUID) -> Recall | None:
        for alias in relay_rows.relay_aliases():
            for row in relay_rows.remove_unsent(alias, message_id):
                return Recall(message_id=message_id, status=RecallStatus.RECALLED, topic=row.topic, key=row.key)
        return None

    def server_problems(self) -> Iterator[str]:
        yield from self.broker.topic_problems()
        groups = sorted({item.subscription.group for item in subscribers()})
        brokers = brokers_of(self.settings.broker, timeout_seconds=_ANSWER_SECONDS)
        yield from missing(brokers, sorted(self.settings.topics), groups)

    def create(self, address: str) -> tuple[int, int]:
        """Create or update the declared topics and groups through a broker's administration port.

        If `address` is empty, do this on each broker that OUTBOX['BROKER'] names. Returns the number of topics and the
        number of groups. Raises UsageError for a subscriber of a topic that is not declared. Raises BrokerError.
        """
        url = self.settings.broker
        admins = [parse_address(address, url)] if address else brokers_of(url)
        if not admins:
            raise UsageError(
                "--create does not know the brokers, because OUTBOX['BROKER'] names no administration port: append "
                "?brokers=BROKER:10911, or run outbox_install --create BROKER:10911 for each broker."
            )
        topics = {name: declared.topic for name, declared in self.settings.topics.items()}
        for item in subscribers():
            if item.subscription.topic not in topics:
                raise UsageError(f"{item.name} subscribes to {item.subscription.topic!r}: declare it in TOPICS.")
        for admin in admins:
            for topic in topics.values():
                admin.create_topic(topic)
            for item in subscribers():
                admin.create_group(item.subscription, topics[item.subscription.topic])
        return len(topics), len(subscribers())

    def given_up(self) -> int:
        """The number of messages that RocketMQ gave up, and that the ledger has not decided yet. Raises BrokerError."""
        group = self.settings.required_producer_group()
        return sum(waiting(broker, group) for broker in brokers_of(self.settings.broker))

    @cached_property
    def _timers(self) -> Timers:
        # All calls of `left` share one `Timers` instance.
        return Timers()

    def leftover_work(self) -> LeftoverWork:
        settings = self.settings
        wanted = [(item.subscription.group, item.subscription.topic) for item in subscribers()]
        topics = sorted({*settings.topics, *(topic for _, topic in wanted)})
        admins = brokers_of(settings.broker)
        if not admins:
            raise UsageError(
                "RocketMQ's clients cannot count the remaining messages: append the administration port of every "
                "broker to OUTBOX['BROKER']: ?brokers=HOST:10911,HOST:10911."
            )
        group = settings.producer_group
        # The rows are counted first: a message that the relay sends meanwhile is found on RocketMQ.
        backlogs = [relay_rows.backlog(alias) for alias in ledger_aliases(usable=True)]
        found = left(admins, wanted, topics, self._timers, producer_group=group)
        waiting = [f"{one.waiting} messages wait for the relay on {one.alias!r}" for one in backlogs if one.waiting]
        parked = [
            f"{one.parked} messages on {one.alias!r} were rejected by RocketMQ (outbox_relay list)"
            for one in backlogs
            if one.parked
        ]
        return replace(found, waiting=[*waiting, *found.waiting], staying=[*parked, *found.staying])


def _mixed_groups() -> Iterator[str]:
    """One text for each group with ordered and concurrent subscriptions, which RocketMQ does not support."""
    kinds: dict[str, set[bool]] = {}
    for item in subscribers():
        kinds.setdefault(item.subscription.group, set()).add(item.subscription.mode == "concurrent")
    for group, concurrent in kinds.items():
        if len(concurrent) > 1:
            yield (
                f"group {group!r} consumes one topic in order and another concurrently, which RocketMQ does not "
                "support in one group: give each topic a separate group."
            )
