"""What the core asks of a broker, and what a broker asks of an application.

Implemented by `outbox.memory.broker.InMemoryBroker`, `outbox.broker.postgres.PostgresBroker` and
`outbox.rocketmq.broker.RocketMQBroker`. One contract suite runs over all; what they differ in is declared
(outbox/capabilities.py, docs/engines.md).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
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
    """Stores messages, hides half ones until they are decided, and asks back.

    Every call either did what it says or raised a BrokerError. `timeout_seconds` is one total deadline for
    connecting, sending and waiting; a call that ran into it may still be stored, which is safe because the
    message id makes a resend idempotent and check-back settles a half nobody waits for.
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

        `committed`: their local transaction has committed before (a repair), so that topics take them whose messages
        must be bound to one.
        """

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """Store messages invisibly until `end` decides them: all or none, durable on return."""

    def take_over(self, producer_group: str, transactional_id: str, *, timeout_seconds: float = 3.0) -> ProducerEpoch:
        """Make the caller the newest instance of a transactional id. Raises LeftoversUndecided where that lasts."""

    def leftovers(self, producer: ProducerEpoch) -> list[UUID]:
        """The undecided half transactions of its older instances; also makes them due for a check at once."""

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        """Record decisions. The first decision of a transaction stands; one status per end, in order."""

    def hint_checks(self, transaction_ids: Sequence[UUID]) -> None:
        """Ask for an early check of half transactions; one-way, so a broker that cannot take it raises nothing."""

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Undecided half messages of the group that are due to be asked about, claimed for this caller."""

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Record what a checker said: decisions are applied, UNKNOWN is rescheduled (None) or parked."""

    def resume_checks(self, producer_group: str) -> int:
        """Make the group's parked transactions due for a check now; returns how many."""

    def recall(self, message_ids: Sequence[UUID], *, timeout_seconds: float = 3.0) -> list[Recall]:
        """Take back messages that wait for their delivery time or for a retry; one outcome per id, in order."""

    def recall_key(self, topic: str, key: str, *, timeout_seconds: float = 10.0) -> list[Recall]:
        """Take back every message of the topic and key that waits so; what was taken. Raises UnknownTopic."""

    def reject_transactional(self, rejecting: bool, *, timeout_seconds: float = 3.0) -> bool:
        """Refuse new transactional messages (True), or take them again; returns whether that changed anything.

        What is stored already goes on: it is decided, checked and delivered.
        """


class Checker(Protocol):
    """Answers check-backs from the application's own data (checkLocalTransaction)."""

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterable[Answer]:
        """One answer per check, in any order, each as soon as it is known.

        An exception counts as UNKNOWN for all checks not answered yet, and is recorded with its text.
        """


class Disposition(enum.StrEnum):
    """What became of a delivery whose handler did not fail."""

    HANDLED = "handled"
    """The handler ran and its effects are stored."""
    SKIPPED = "skipped"
    """The inbox already had it: an earlier delivery took effect."""


class Invoker(Protocol):
    """Calls a handler, with whatever must surround it (the inbox, a transaction, connection care)."""

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        """One result per delivery, in order; an exception says that this delivery failed.

        A handler of `batch` > 1 gets the list, any other one delivery. `generation` is the inbox generation
        of the consumer group. Never raises for an error of the handler. HandlerNotStarted says that the handler was
        not called and that this is no attempt at the message.
        """


def call_handler(
    subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
) -> Sequence[Disposition | Exception]:
    """The plain Invoker: no inbox, so effects may happen again when a delivery is repeated."""
    try:
        handler(deliveries if subscription.batch > 1 else deliveries[0])  # type: ignore[arg-type]
    except PartialFailure as partial:
        return [partial.errors.get(d.message_id, Disposition.HANDLED) for d in deliveries]
    except Exception as error:
        return [error] * len(deliveries)
    return [Disposition.HANDLED] * len(deliveries)
