"""The in-memory broker: stores messages and decisions, asks for missing decisions, and runs consumers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from outbox.codec import Codecs
from outbox.errors import InvalidMessage, ProducerFenced
from outbox.memory.consumers import ConsumerGroups, DeadLetter
from outbox.memory.log import Log, Transaction
from outbox.message import Message, SendReceipt
from outbox.ports import AnyHandler, Invoker, call_handler
from outbox.recall import Recall, RecallStatus
from outbox.subscription import Subscription
from outbox.topic import Topic
from outbox.transaction import (
    Answer,
    Check,
    CheckSettings,
    DecidedBy,
    Decision,
    EndStatus,
    EndTransaction,
    HalfTransaction,
    ProducerEpoch,
)


class InMemoryBroker:
    """Implements `ports.Broker`. `drain` runs the handlers that `subscribe` registered, in the calling thread.

    `clock` returns the time (default: the real time). `advance` adds seconds to the time that `clock` returns.
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
        self.incidents: list[str] = []
        self._epochs: Counter[tuple[str, str]] = Counter()
        self._clock = clock
        self._advanced = timedelta()
        self._log = Log(topics, auto_create_topics=auto_create_topics, now=self.now)
        self._check = check or CheckSettings()
        self.groups = ConsumerGroups(self._log, codecs=codecs or Codecs(), invoker=invoker, now=self.now)

    def copy(self) -> InMemoryBroker:
        """Return a broker with the same messages, subscribers and positions, which goes its own way from now on."""
        with self._log.lock:
            shared = [self._clock, *self._log.immutable(), *self.groups.immutable()]
            return copy.deepcopy(self, {id(one): one for one in shared})

    # -- time -----------------------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the broker's time."""
        return self._clock() + self._advanced

    def advance(self, seconds: float) -> None:
        """Add seconds to the broker's time."""
        self._advanced += timedelta(seconds=seconds)

    # -- sending --------------------------------------------------------------------------------

    def send(
        self,
        messages: Sequence[Message],
        *,
        timeout_seconds: float = 3.0,
        committed: bool = False,
        producer: ProducerEpoch | None = None,
    ) -> list[SendReceipt]:
        with self._log.lock:
            self._check_epoch(producer)
            self._log.check_accepts(messages, transactional=None if committed else False)
            transaction = self._log.store(messages, half=None)
            if transaction.decision is Decision.UNKNOWN:
                self._log.decide(transaction, Decision.COMMIT)
            return self._log.receipts(messages)

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        with self._log.lock:
            self._check_epoch(half.producer)
            self._log.check_accepts(half.messages, transactional=True)
            immunity = self._check.immunity_seconds if half.immunity_seconds is None else half.immunity_seconds
            immune_until = self.now() + timedelta(seconds=immunity)
            transaction = self._log.store(half.messages, half=half, immune_until=immune_until)
            if transaction.decision is not Decision.UNKNOWN:
                raise InvalidMessage(
                    f"half message {half.transaction_id} was sent before and is decided "
                    f"({transaction.decision.name}): create a new message for another transaction."
                )
            return self._log.receipts(half.messages)

    # -- producers with a transactional id --------------------------------------------------------

    def take_over(self, producer_group: str, transactional_id: str, *, timeout_seconds: float = 3.0) -> ProducerEpoch:
        with self._log.lock:
            self._epochs[producer_group, transactional_id] += 1
            epoch = self._epochs[producer_group, transactional_id]
            return ProducerEpoch(producer_group=producer_group, transactional_id=transactional_id, epoch=epoch)

    def leftovers(self, producer: ProducerEpoch) -> list[UUID]:
        with self._log.lock:
            found = [t for t in self._log.undecided() if t.half is not None and _is_older(t.half.producer, producer)]
            for transaction in found:
                transaction.immune_until = transaction.due_at = self.now()
            return [transaction.transaction_id for transaction in found]

    def _check_epoch(self, producer: ProducerEpoch | None) -> None:
        if producer is None:
            return
        newest = self._epochs[producer.producer_group, producer.transactional_id]
        if producer.epoch != newest:
            raise ProducerFenced(
                f"producer {producer.transactional_id!r} of group {producer.producer_group!r} is fenced: this "
                f"instance has epoch {producer.epoch}, and a newer instance has epoch {newest}. Nothing was "
                "published."
            )

    # -- deciding -------------------------------------------------------------------------------

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        with self._log.lock:
            return [self._end(end) for end in ends]

    def _end(self, end: EndTransaction) -> EndStatus:
        transaction = self._log.find(end.transaction_id)
        if transaction is None or transaction.half is None or transaction.half.producer_group != end.producer_group:
            self.incidents.append(f"end of {end.transaction_id} by group {end.producer_group!r} was refused")
            return EndStatus.REFUSED
        if transaction.decision is Decision.UNKNOWN:
            self._log.decide(transaction, end.decision)
            return EndStatus.APPLIED
        if transaction.decision is end.decision:
            return EndStatus.REPEATED
        self.incidents.append(f"end {end.decision.name} of {end.transaction_id} contradicts its first decision")
        return EndStatus.CONTRADICTED

    # -- check-back -----------------------------------------------------------------------------

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Claim the group's undecided half messages that are due for a check. This broker parks none of them."""
        with self._log.lock:
            due = [(t, t.half) for t in self._log.undecided() if t.half is not None and t.due_at <= self.now()]
            mine = [one for one in due if one[1].producer_group == producer_group]
            return [self._claimed(*one) for one in mine[:limit]]

    def _claimed(self, transaction: Transaction, half: HalfTransaction) -> Check:
        now = self.now()
        may_write = now >= transaction.immune_until
        transaction.due_at = (
            now + timedelta(seconds=self._check.recheck_seconds) if may_write else transaction.immune_until
        )
        return self._check_of(transaction, half, may_write=may_write)

    def _check_of(self, transaction: Transaction, half: HalfTransaction, *, may_write: bool = True) -> Check:
        return Check(
            transaction_id=transaction.transaction_id,
            producer_group=half.producer_group,
            ledger_id=half.ledger_id,
            message=half.messages[0],
            stored_at=transaction.stored_at,
            age_seconds=(self.now() - transaction.stored_at).total_seconds(),
            checks=transaction.checks,
            may_write=may_write,
        )

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        with self._log.lock:
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
        transaction = self._log.find(answer.transaction_id)
        assert transaction is not None, "there is no transaction for this answer: answer only claimed checks"
        transaction.checks += answer.counts and self.now() >= transaction.immune_until
        return None

    # -- operator actions ---------------------------------------------------------------------------

    def recall(self, message_ids: Sequence[UUID], *, timeout_seconds: float = 3.0) -> list[Recall]:
        with self._log.lock:
            return [self._recall(message_id) for message_id in message_ids]

    def recall_key(self, topic: str, key: str, *, timeout_seconds: float = 10.0) -> list[Recall]:
        with self._log.lock:
            self._log.topic(topic)
            waiting = [*self._log.scheduled(), *self.groups.retrying()]
            wanted = {message.message_id for message in waiting if (message.topic, message.key) == (topic, key)}
            return [one for one in self.recall(sorted(wanted)) if one.status is RecallStatus.RECALLED]

    def _recall(self, message_id: UUID) -> Recall:
        entry = self._log.entry(message_id)
        if entry is None:
            return Recall(message_id=message_id, status=RecallStatus.UNKNOWN)
        message = entry.message
        groups = self.groups.recall(message_id)
        status = RecallStatus.RECALLED if groups else self._log.recall(message_id)
        return Recall(message_id=message_id, status=status, topic=message.topic, key=message.key, groups=groups)

    def topic(self, name: str) -> Topic:
        with self._log.lock:
            return self._log.topic(name)

    def take_turn(
        self, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
    ) -> bool:
        """Return True, because no other process shares this broker."""
        return True

    # -- calls that send one way: here they act at once, so that tests need not wait -----------------------

    def end_one_way(self, end: EndTransaction) -> None:
        self.end([end])

    def hint_one_way(self, transaction_id: UUID) -> None:
        with self._log.lock:
            transaction = self._log.find(transaction_id)
            if transaction is not None:
                transaction.due_at = min(transaction.due_at, self.now())

    def flush(self, *, within_seconds: float) -> bool:
        """Return True, because this broker executes every request at once, and no request is still to be sent."""
        return True

    def notify_decided(self) -> None:
        """Do nothing, because consumers look for new messages themselves."""

    def publishing_failed(self, error: Exception) -> None:
        """Do nothing, because this broker has no status."""

    def publishing_worked(self) -> None:
        """Do nothing, because this broker has no status."""

    def close(self) -> None:
        """Do nothing. The messages stay as long as the broker object exists."""

    # -- queries ------------------------------------------------------------------------------------

    def undecided(self) -> list[Check]:
        """The checks of the undecided transactions, oldest first, without a wait for their immunity."""
        with self._log.lock:
            return [self._check_of(one, one.half) for one in self._log.undecided() if one.half is not None]

    # -- consuming ------------------------------------------------------------------------------

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters of all groups, oldest first."""
        return self.groups.dead_letters

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        """Register a handler for the next `drain`. A second handler for the same group and topic replaces the first."""
        self.groups.subscribe(subscription, handler)

    def visible(self, topic: str) -> list[Message]:
        """Return the messages that consumers of a topic can see, in the order of the queues and their offsets."""
        with self._log.lock:
            self._log.sequence()
            return [entry.message for _, queue in self._log.queues_of(topic) for entry in queue]

    def drain(self) -> int:
        """Run handlers until no message can be delivered now. Return the number of handled deliveries.

        A failed message waits for its retry delay. Call `advance` to end the delay.
        """
        return self.groups.drain()


def _is_older(instance: ProducerEpoch | None, than: ProducerEpoch) -> bool:
    return instance is not None and replace(instance, epoch=than.epoch) == than and instance.epoch < than.epoch
