"""The ports: what the core needs from an engine, and what an engine needs from an application.

An engine has a `Broker` and `Consumers`: PostgreSQL `outbox.broker.postgres.PostgresBroker` and
`outbox.broker.consumer.runtime.ConsumerRuntime`, RocketMQ `outbox.rocketmq.broker.RocketMQBroker` and
`outbox.rocketmq.consumer.RocketMQConsumers`, the one in memory `outbox.memory.broker.InMemoryBroker` and
`outbox.memory.consumers.InMemoryConsumers`. One contract suite (tests/contract) runs over all of them. What an engine
lacks is in its table of refusals (outbox/refusals.py, docs/engines.md).

See decision 001.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from outbox.errors import PartialFailure
from outbox.message import Delivery, Message, SendReceipt
from outbox.recall import Recall
from outbox.subscription import Subscription
from outbox.topic import Topic
from outbox.transaction import Answer, Check, EndStatus, EndTransaction, HalfTransaction, ProducerEpoch

Handler = Callable[[Delivery], Any]
BatchHandler = Callable[[Sequence[Delivery]], Any]
AnyHandler = Handler | BatchHandler


class Broker(Protocol):
    """Stores messages, hides half messages until they are decided, and asks for missing decisions.

    Every call either succeeds or raises a BrokerError. `timeout_seconds` is one total deadline for connecting, sending
    and waiting. A call that exceeds it may still have stored the message. That is safe: the message id makes a resend
    idempotent, and check-back settles a half whose caller gave up.
    """

    def send(
        self,
        messages: Sequence[Message],
        *,
        timeout_seconds: float = 3.0,
        committed: bool = False,
        producer: ProducerEpoch | None = None,
    ) -> list[SendReceipt]:
        """Store messages, visible at once: all or none. Raises ProducerFenced for an older instance of a producer.

        `committed` says that their local transaction has already committed (a repair). Topics that require a local
        transaction then accept them.
        """

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """Store messages invisibly until `end` decides them: all or none, durable on return."""

    def take_over(self, producer_group: str, transactional_id: str, *, timeout_seconds: float = 3.0) -> ProducerEpoch:
        """Make the caller the newest instance of a transactional id.

        Raises LeftoversUndecided if the older instances' transactions are still undecided at the deadline.
        """

    def leftovers(self, producer: ProducerEpoch) -> list[UUID]:
        """The undecided half transactions of its older instances. The call also makes them due for a check at once."""

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        """Record decisions and return one status per decision, in order. A transaction's first decision is final."""

    def hint_checks(self, transaction_ids: Sequence[UUID]) -> None:
        """Ask for an early check of half transactions. It is one-way: a broker that cannot take it raises nothing."""

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Claim for this caller the group's undecided half messages that are due for a check."""

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Record the answers of a checker and return one status per answer.

        A decision is applied. UNKNOWN reschedules the check (status None) or parks the transaction.
        """

    def resume_checks(self, producer_group: str) -> int:
        """Make the group's parked transactions due for a check now; returns their number."""

    def recall(self, message_ids: Sequence[UUID], *, timeout_seconds: float = 3.0) -> list[Recall]:
        """Recall messages that wait for their delivery time or for a retry; one outcome per id, in order."""

    def recall_key(self, topic: str, key: str, *, timeout_seconds: float = 10.0) -> list[Recall]:
        """Recall every waiting message of the topic and key; returns the recalled ones. Raises UnknownTopic."""

    def reject_transactional(self, rejecting: bool, *, timeout_seconds: float = 3.0) -> bool:
        """Refuse new transactional messages (True) or accept them again (False); returns whether the state changed.

        Stored messages continue: they are decided, checked and delivered.
        """

    def topic(self, name: str) -> Topic:
        """The topic as the broker knows it. Raises UnknownTopic."""

    def declare(self, topics: Sequence[Topic]) -> None:
        """Create topics or change them to the declaration. An engine that does neither raises NotSupported."""

    def take_turn(
        self, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
    ) -> bool:
        """Whether this process is to run a periodic pass of the group now; the broker records that it does.

        An engine that records no turns returns True: every process runs the pass.
        """

    # What follows returns at once and never fails. An engine that needs none of it does nothing.

    def end_one_way(self, end: EndTransaction) -> None:
        """`end` without waiting for the answer. The decision may be lost: then check-back finds it."""

    def hint_one_way(self, transaction_id: UUID) -> None:
        """`hint_checks` for one transaction, without waiting for the answer."""

    def flush(self, *, within_seconds: float) -> bool:
        """Wait until what was sent one way has arrived or is given up; False if the time ran out first."""

    def notify_decided(self) -> None:
        """Report that messages were decided in the broker's database, so that consumers see them soon."""

    def publishing_failed(self, error: Exception) -> None:
        """Record for the broker's status that this process cannot publish."""

    def publishing_worked(self) -> None:
        """Record that this process can publish again."""

    def close(self) -> None:
        """Flush, and release connections and threads. The next call opens them again."""


@dataclass(frozen=True)
class ConsumeCounts:
    """The results of a bounded pass: outcomes of handlers, and the number of filtered messages."""

    handled: int = 0
    skipped: int = 0
    filtered: int = 0
    failed: int = 0


class Consumers(Protocol):
    """Runs the handlers of one process's subscriptions. Delivery is at least once; positions are the group's."""

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set. Then start no more handlers, and finish the running ones.

        Raises what is wrong with the subscriptions, and HandlersHung if too many handlers hang.
        """

    def run_once(self) -> ConsumeCounts:
        """Handle what can be delivered to these subscriptions now. It does not wait for what is due later.

        An engine that cannot know what is due raises NotSupported.
        """


class Checker(Protocol):
    """Answers check-backs from the application's own data (checkLocalTransaction)."""

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterable[Answer]:
        """Yield one answer per check, in any order, each as soon as it is known.

        An exception counts as UNKNOWN for all unanswered checks and is recorded with its text.
        """


class Disposition(enum.StrEnum):
    """The result of a delivery whose handler did not fail."""

    HANDLED = "handled"
    """The handler ran and its effects are stored."""
    SKIPPED = "skipped"
    """The inbox already had the message: an earlier delivery took effect."""


class Invoker(Protocol):
    """Calls a handler inside its surroundings: the inbox, a transaction, and connection care."""

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        """Return one result per delivery, in order; an exception says that this delivery failed.

        A handler of `batch` > 1 gets the list, any other handler gets one delivery. `generation` is the inbox
        generation of the consumer group. An error of the handler is returned, not raised. HandlerNotStarted says that
        the handler was not called; the delivery then counts as no attempt.
        """


def call_handler(
    subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
) -> Sequence[Disposition | Exception]:
    """The plain Invoker, without an inbox: a repeated delivery repeats the handler's effects."""
    try:
        handler(deliveries if subscription.batch > 1 else deliveries[0])  # type: ignore[arg-type]
    except PartialFailure as partial:
        return [partial.errors.get(d.message_id, Disposition.HANDLED) for d in deliveries]
    except Exception as error:
        return [error] * len(deliveries)
    return [Disposition.HANDLED] * len(deliveries)


@dataclass(frozen=True, slots=True)
class LeftoverWork:
    """The unfinished work of a broker when a project moves to another engine, as texts.

    Workers finish `waiting` by themselves; `staying` needs an operator.

    `written` is the count of all messages ever written to the places that were read. An engine without a snapshot
    compares it between two looks: if both found nothing and it did not change, no message moved between the places
    meanwhile. It is 0 for an engine that reads one snapshot.
    """

    waiting: list[str] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)
    written: int = 0
