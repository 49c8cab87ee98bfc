"""The ports: the core's demands on a broker, and a broker's demands on an application.

`outbox.memory.broker.InMemoryBroker`, `outbox.broker.postgres.PostgresBroker` and
`outbox.rocketmq.broker.RocketMQBroker` implement them. One contract suite runs over all of them. Each engine declares
its differences (outbox/capabilities.py, docs/engines.md).

See decision 001.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from outbox.errors import PartialFailure
from outbox.message import Delivery, Message, SendReceipt
from outbox.recall import Recall
from outbox.subscription import Subscription
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
