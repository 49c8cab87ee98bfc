"""A broker in memory, for tests of applications: the protocol of the real one, without durability.

It passes the same contract suite as the PostgreSQL broker (tests/contract). It has no atomic path, since
it has no database to share a transaction with, and it lives in one process.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from outbox.codec import Codecs
from outbox.errors import InvalidMessage, TransactionalMessagesRejected, UndecodableBody, UnknownTopic
from outbox.filters.filter import Filter, parse_filter
from outbox.message import Delivery, Message, SendReceipt
from outbox.ports import AnyHandler, Disposition, Invoker, call_handler
from outbox.subscription import OnError, Start, Subscription
from outbox.topic import Topic, select_shard
from outbox.transaction import (
    Answer,
    Check,
    CheckSettings,
    DecidedBy,
    Decision,
    EndStatus,
    EndTransaction,
    HalfTransaction,
)


@dataclass
class _Entry:
    """One stored message and its place in the log."""

    log_id: int
    message: Message
    transaction: _Transaction


@dataclass
class _Transaction:
    transaction_id: UUID
    half: HalfTransaction | None
    stored_at: datetime
    entries: list[_Entry] = field(default_factory=list)
    decision: Decision = Decision.UNKNOWN
    due_at: datetime | None = None
    checks: int = 0
    parked: bool = False


@dataclass
class _Consumer:
    subscription: Subscription
    handler: AnyHandler
    filter: Filter
    positions: Counter[int] = field(default_factory=Counter)
    seen: set[UUID] = field(default_factory=set)


@dataclass(frozen=True)
class DeadLetter:
    """A message a group gave up, with the error of every attempt."""

    group: str
    message: Message
    errors: tuple[str, ...]


class InMemoryBroker:
    """Implements `ports.Broker`; `subscribe` and `drain` run handlers in the calling thread.

    Time is a parameter: `clock` tells it (default: the real time), `advance` moves it on.
    """

    def __init__(
        self,
        topics: Iterable[Topic] = (),
        *,
        auto_create_topics: bool = True,
        codecs: Codecs | None = None,
        invoker: Invoker = call_handler,
        check: CheckSettings | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._topics = {topic.name: topic for topic in topics}
        self._auto_create = auto_create_topics
        self._codecs = codecs or Codecs()
        self._invoker = invoker
        self._check = check or CheckSettings()
        self._clock = clock
        self._offset = timedelta()
        self._lock = threading.RLock()
        self._log_ids = itertools.count(1)
        self._entries: dict[UUID, _Entry] = {}
        self._transactions: dict[UUID, _Transaction] = {}
        self._queues: defaultdict[tuple[str, int], list[_Entry]] = defaultdict(list)
        self._scheduled: list[tuple[datetime, int, _Entry]] = []
        self._retries: list[tuple[datetime, int, _Consumer, _Entry, int]] = []
        self._sequence = itertools.count()
        self._held: list[_Entry] = []
        self._errors: defaultdict[tuple[str, UUID], list[str]] = defaultdict(list)
        self._consumers: list[_Consumer] = []
        self.dead_letters: list[DeadLetter] = []
        self.incidents: list[str] = []
        self.reject_transactional = False

    # -- time -----------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The broker's time."""
        return self._clock() + self._offset

    def advance(self, seconds: float) -> None:
        """Move the broker's time on."""
        self._offset += timedelta(seconds=seconds)

    # -- sending --------------------------------------------------------------------------------

    def declare(self, topics: Iterable[Topic]) -> None:
        """Add or replace topics."""
        self._topics.update((topic.name, topic) for topic in topics)

    def send(self, messages: Sequence[Message], *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """See ports.Broker."""
        with self._lock:
            self._accept(messages, transactional=False)
            transaction = self._store(messages, half=None)
            if transaction.decision is Decision.UNKNOWN:
                self._decide(transaction, Decision.COMMIT)
            return self._receipts(messages)

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """See ports.Broker."""
        with self._lock:
            if self.reject_transactional:
                raise TransactionalMessagesRejected()
            self._accept(half.messages, transactional=True)
            transaction = self._store(half.messages, half=half)
            if transaction.decision is not Decision.UNKNOWN:
                raise InvalidMessage(
                    f"half message {half.transaction_id} was sent before and is decided ({transaction.decision.name}): "
                    f"build a new message for another transaction."
                )
            return self._receipts(half.messages)

    def _accept(self, messages: Sequence[Message], *, transactional: bool) -> None:
        if not messages:
            raise InvalidMessage("there is no message to send: pass at least one.")
        for message in messages:
            self._topic(message.topic).check_accepts(message, transactional=transactional)

    def _topic(self, name: str) -> Topic:
        if name not in self._topics:
            if not self._auto_create:
                raise UnknownTopic(f"topic {name!r} is not declared; declared are: {', '.join(sorted(self._topics))}.")
            self._topics[name] = Topic(name=name)
        return self._topics[name]

    def _store(self, messages: Sequence[Message], *, half: HalfTransaction | None) -> _Transaction:
        known = self._entries.get(messages[0].message_id)
        if known is not None:
            return known.transaction
        transaction = _Transaction(messages[0].message_id, half, self.now())
        if half is not None:
            immunity = self._check.immunity_seconds if half.immunity_seconds is None else half.immunity_seconds
            transaction.due_at = transaction.stored_at + timedelta(seconds=immunity)
        self._transactions[transaction.transaction_id] = transaction
        for message in messages:
            entry = self._entries[message.message_id] = _Entry(next(self._log_ids), message, transaction)
            transaction.entries.append(entry)
        return transaction

    def _receipts(self, messages: Sequence[Message]) -> list[SendReceipt]:
        entries = [self._entries[message.message_id] for message in messages]
        return [
            SendReceipt(
                message_id=entry.message.message_id,
                transaction_id=entry.transaction.transaction_id,
                topic=entry.message.topic,
                position=entry.log_id,
            )
            for entry in entries
        ]

    # -- deciding -------------------------------------------------------------------------------

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        """See ports.Broker."""
        with self._lock:
            return [self._end(end) for end in ends]

    def _end(self, end: EndTransaction) -> EndStatus:
        transaction = self._transactions.get(end.transaction_id)
        if transaction is None or transaction.half is None or transaction.half.producer_group != end.producer_group:
            self.incidents.append(f"end of {end.transaction_id} by group {end.producer_group!r} was refused")
            return EndStatus.REFUSED
        if transaction.decision is Decision.UNKNOWN:
            self._decide(transaction, end.decision)
            return EndStatus.APPLIED
        if transaction.decision is end.decision:
            return EndStatus.REPEATED
        self.incidents.append(f"end {end.decision.name} of {end.transaction_id} contradicts its first decision")
        return EndStatus.CONTRADICTED

    def _decide(self, transaction: _Transaction, decision: Decision) -> None:
        transaction.decision = decision
        if decision is Decision.COMMIT:
            for entry in transaction.entries:
                deliver_at = entry.message.deliver_at
                if deliver_at is not None and deliver_at > self.now():
                    heapq.heappush(self._scheduled, (deliver_at, entry.log_id, entry))
                else:
                    self._held.append(entry)
        self._sequence_ready()

    def _sequence_ready(self) -> None:
        """Append what is decided, in log order, unless an earlier message of its key is undecided."""
        while self._scheduled and self._scheduled[0][0] <= self.now():
            self._held.append(heapq.heappop(self._scheduled)[2])
        waiting, self._held = sorted(self._held, key=lambda entry: entry.log_id), []
        blocked = {
            (entry.message.topic, entry.message.key): entry.log_id
            for transaction in reversed(self._transactions.values())
            if transaction.decision is Decision.UNKNOWN
            for entry in reversed(transaction.entries)
            if self._blocks(entry)
        }
        for entry in waiting:
            topic = self._topics[entry.message.topic]
            blocker = blocked.get((topic.name, entry.message.key)) if topic.is_fifo else None
            if blocker is not None and blocker < entry.log_id:
                self._held.append(entry)
                continue
            shard = select_shard(entry.message, queue_count=topic.queue_count)
            number = (entry.log_id if shard is None else shard) % topic.queue_count
            self._queues[topic.name, number].append(entry)

    def _blocks(self, entry: _Entry) -> bool:
        topic = self._topics[entry.message.topic]
        released = entry.transaction.parked and topic.on_park == "release"
        return topic.is_fifo and entry.message.deliver_at is None and not released

    # -- check-back -----------------------------------------------------------------------------

    def hint_checks(self, transaction_ids: Sequence[UUID]) -> None:
        """See ports.Broker."""
        with self._lock:
            for transaction_id in transaction_ids:
                transaction = self._transactions.get(transaction_id)
                if transaction is not None and transaction.due_at is not None:
                    transaction.due_at = self.now()

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """See ports.Broker."""
        with self._lock:
            due = [t for t in self._transactions.values() if self._is_due(t, producer_group)][:limit]
            for transaction in due:
                transaction.due_at = self.now() + timedelta(seconds=self._check.recheck_seconds)
            return [self._as_check(transaction) for transaction in due]

    def _is_due(self, transaction: _Transaction, producer_group: str) -> bool:
        return (
            transaction.half is not None
            and transaction.half.producer_group == producer_group
            and transaction.decision is Decision.UNKNOWN
            and not transaction.parked
            and transaction.due_at is not None
            and transaction.due_at <= self.now()
        )

    def _as_check(self, transaction: _Transaction) -> Check:
        half = transaction.half
        assert half is not None
        return Check(
            transaction_id=transaction.transaction_id,
            producer_group=half.producer_group,
            ledger_id=half.ledger_id,
            checker=half.checker,
            message=half.messages[0],
            stored_at=transaction.stored_at,
            age_seconds=(self.now() - transaction.stored_at).total_seconds(),
            checks=transaction.checks,
        )

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """See ports.Broker."""
        with self._lock:
            return [self._report(producer_group, answer) for answer in answers]

    def _report(self, producer_group: str, answer: Answer) -> EndStatus | None:
        if answer.alarm:
            self.incidents.append(f"check of {answer.transaction_id}: {answer.detail}")
        if answer.decision is not Decision.UNKNOWN:
            return self._end(
                EndTransaction(
                    transaction_id=answer.transaction_id,
                    decision=answer.decision,
                    producer_group=producer_group,
                    decided_by=DecidedBy.CHECK,
                )
            )
        transaction = self._transactions[answer.transaction_id]
        transaction.checks += answer.counts
        age = (self.now() - transaction.stored_at).total_seconds()
        if transaction.checks >= self._check.max_checks or age >= self._check.max_age_seconds:
            transaction.parked = True
            self.incidents.append(f"transaction {answer.transaction_id} was parked after {transaction.checks} checks")
            self._sequence_ready()
        return None

    def undecided(self) -> list[UUID]:
        """Half transactions that nobody has decided, oldest first."""
        with self._lock:
            return [t.transaction_id for t in self._transactions.values() if t.decision is Decision.UNKNOWN]

    def parked(self) -> list[UUID]:
        """Transactions past the check limits: a late end still decides them."""
        return [t.transaction_id for t in self._transactions.values() if t.parked and t.decision is Decision.UNKNOWN]

    # -- consuming ------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        """Register a handler; it sees what is delivered by the next `drain`."""
        with self._lock:
            self._topic(subscription.topic)
            consumer = _Consumer(subscription, handler, parse_filter(subscription.filter))
            if subscription.start is not Start.FIRST:
                since = self.now() if subscription.start is Start.LAST else subscription.start
                assert isinstance(since, datetime)
                for (topic, number), queue in self._queues.items():
                    if topic == subscription.topic:
                        earlier = sum(entry.transaction.stored_at < since for entry in queue)
                        consumer.positions[number] = earlier
            self._consumers.append(consumer)

    def visible(self, topic: str) -> list[Message]:
        """What consumers of a topic can see: queue by queue, in queue order."""
        with self._lock:
            self._sequence_ready()
            queues = sorted(item for item in self._queues.items() if item[0][0] == topic)
            return [entry.message for _, queue in queues for entry in queue]

    def drain(self) -> int:
        """Run handlers until nothing is deliverable now; returns how many deliveries were handled.

        Failed messages wait for their retry delay: `advance` the time to see them again.
        """
        handled = 0
        while (round_handled := sum(self._drain_consumer(consumer) for consumer in list(self._consumers))) > 0:
            handled += round_handled
        return handled

    def _drain_consumer(self, consumer: _Consumer) -> int:
        count = 0
        while batch := self._next_batch(consumer):
            self._deliver(consumer, batch)
            count += len(batch)
        return count

    def _next_batch(self, consumer: _Consumer) -> list[tuple[_Entry, int, str, int]]:
        """Up to `batch` due entries as (entry, attempt, queue, offset), positions moved past them."""
        subscription = consumer.subscription
        batch: list[tuple[_Entry, int, str, int]] = []
        with self._lock:
            self._sequence_ready()
            due = [retry for retry in self._retries if retry[2] is consumer and retry[0] <= self.now()]
            for retry in sorted(due, key=lambda item: item[:2])[: subscription.batch]:
                self._retries.remove(retry)
                batch.append((retry[3], retry[4], f"%RETRY%{subscription.group}", retry[1]))
            for (topic, number), queue in sorted(self._queues.items(), key=lambda item: item[0]):
                while topic == subscription.topic and len(batch) < subscription.batch:
                    offset = consumer.positions[number]
                    if offset >= len(queue):
                        break
                    consumer.positions[number] += 1
                    message = queue[offset].message
                    if consumer.filter.evaluate(message.tag, message.headers):
                        batch.append((queue[offset], 1, f"{topic}/{number}", offset))
        return batch

    def _deliver(self, consumer: _Consumer, batch: list[tuple[_Entry, int, str, int]]) -> None:
        deliveries: list[Delivery] = []
        for entry, attempt, queue, offset in batch:
            try:
                body = self._codecs.decode(entry.message.content_type, entry.message.body)
            except UndecodableBody as error:
                self._give_up(consumer, entry, str(error))
                continue
            deliveries.append(
                Delivery(
                    message=entry.message,
                    body=body,
                    group=consumer.subscription.group,
                    queue=queue,
                    offset=offset,
                    attempt=attempt,
                )
            )
        if not deliveries:
            return
        results = self._invoker(consumer.subscription, consumer.handler, deliveries, generation=1)
        for delivery, result in zip(deliveries, results, strict=True):
            if not isinstance(result, Disposition):
                self._failed(consumer, delivery, result)

    def _failed(self, consumer: _Consumer, delivery: Delivery, error: Exception) -> None:
        subscription = consumer.subscription
        entry = self._entries[delivery.message_id]
        text = f"{type(error).__name__}: {error}"
        reaction = subscription.reaction(error)
        if reaction is OnError.DEAD_LETTER or subscription.retry.exhausted(delivery.attempt):
            self._give_up(consumer, entry, text)
            return
        self._errors[subscription.group, delivery.message_id].append(text)
        due = self.now() + timedelta(seconds=subscription.retry_delay_seconds(error, delivery.attempt))
        with self._lock:
            self._retries.append((due, next(self._sequence), consumer, entry, delivery.attempt + 1))

    def _give_up(self, consumer: _Consumer, entry: _Entry, error: str) -> None:
        group = consumer.subscription.group
        errors = (*self._errors.pop((group, entry.message.message_id), []), error)
        self.dead_letters.append(DeadLetter(group, entry.message, errors))
