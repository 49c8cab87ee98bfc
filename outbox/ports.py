"""The ports: the interfaces that the core needs from an engine, and that an engine needs from an application.

An engine has a `Broker` and `Consumers`. The engine of PostgreSQL has `outbox.broker.postgres.PostgresBroker` and
`outbox.broker.consumer.runtime.ConsumerRuntime`. The engine in memory has `outbox.memory.broker.InMemoryBroker` and
`outbox.memory.consumers.InMemoryConsumers`. Parts add others. One contract suite (tests/contract) tests all engines.
The features that an engine lacks are in its table of refusals (outbox/refusals.py, docs/engines.md).

See decision 001.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
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
    and waiting. If a call exceeds this deadline, the broker may still have stored the message. The caller may send the
    message again, because a message id is stored only once. If the caller gives up, check-back decides the half
    message.
    """

    def send(
        self,
        messages: Sequence[Message],
        *,
        timeout_seconds: float = 3.0,
        committed: bool = False,
        producer: ProducerEpoch | None = None,
    ) -> list[SendReceipt]:
        """Store all messages or none.

        Consumers can see stored messages at once. Raises ProducerFenced for an older instance of the producer.

        `committed` says that the local transaction of the messages has already committed (a repair). With `committed`,
        a topic that requires a local transaction accepts the messages.
        """

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """Store all messages or none.

        When the call returns, the messages are durable, but they are invisible until `end` decides them.
        """

    def take_over(self, producer_group: str, transactional_id: str, *, timeout_seconds: float = 3.0) -> ProducerEpoch:
        """Make the caller the newest instance of a transactional id.

        If transactions of older instances are still undecided at the deadline, raises LeftoversUndecided.
        """

    def leftovers(self, producer: ProducerEpoch) -> list[UUID]:
        """Return the undecided transactions of the producer's older instances, and make them due for a check now."""

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        """Record decisions.

        Return one status per decision, in the same order. The first decision of a transaction is final.
        """

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Claim the group's undecided half messages that are due for a check."""

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Record the answers of a checker. Return one status per answer.

        COMMIT and ROLLBACK are stored as decisions. UNKNOWN has the status None: the check is repeated, or the
        transaction is parked.
        """

    def recall(self, message_ids: Sequence[UUID], *, timeout_seconds: float = 3.0) -> list[Recall]:
        """Recall messages that wait for their delivery time or for a retry.

        Return one outcome per id, in the order of the ids.
        """

    def recall_key(self, topic: str, key: str, *, timeout_seconds: float = 10.0) -> list[Recall]:
        """Recall every waiting message of the topic and key. Return the recalled messages. Raises UnknownTopic."""

    def topic(self, name: str) -> Topic:
        """Return the topic with the properties that the broker has stored. Raises UnknownTopic."""

    def take_turn(
        self, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
    ) -> bool:
        """Return whether this process should run a periodic pass of the group now.

        If the result is True, the broker has recorded the turn.

        An engine that records no turns returns True, so every process runs the pass.
        """

    # The methods below this line return at once and never fail. If an engine does not need a method, the method does
    # nothing.

    def end_one_way(self, end: EndTransaction) -> None:
        """Like `end`, but do not wait for the answer. If the request is lost, check-back finds the decision."""

    def hint_one_way(self, transaction_id: UUID) -> None:
        """Ask for an early check of a half message."""

    def flush(self, *, within_seconds: float) -> bool:
        """Wait until all one-way requests have arrived or were given up.

        Return False if the wait is longer than `within_seconds`.
        """

    def notify_decided(self) -> None:
        """Report that messages were decided in the broker's database, so that consumers see the messages soon."""

    def publishing_failed(self, error: Exception) -> None:
        """Record for the broker's status that this process cannot publish."""

    def publishing_worked(self) -> None:
        """Record that this process can publish again."""

    def close(self) -> None:
        """Flush, then release connections and threads. The next call of the broker opens new connections."""


@dataclass(frozen=True)
class ConsumeCounts:
    """The counts of a bounded pass: deliveries by outcome, and messages that the filter left out."""

    handled: int = 0
    skipped: int = 0
    filtered: int = 0
    failed: int = 0
    timed_out: int = 0


class Consumers(Protocol):
    """Runs the handlers of one process's subscriptions. Delivery is at least once. Each group has its own offsets."""

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set. After `stop` is set, start no more handlers, and wait for the running handlers.

        If the subscriptions are invalid, raises the error. If too many handlers hang, raises HandlersHung.
        """

    def run_once(self) -> ConsumeCounts:
        """Handle the messages that can be delivered to these subscriptions now. Do not wait for later messages.

        An engine that cannot find out which messages are due raises NotSupported.
        """


class Checker(Protocol):
    """Answers check-backs from the application's own data (checkLocalTransaction)."""

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterable[Answer]:
        """Yield one answer per check, in any order, as soon as the answer is known.

        If the checker raises an exception, each unanswered check has the answer UNKNOWN, and the text of the exception
        is recorded.
        """


class Disposition(enum.StrEnum):
    """The result of a delivery whose handler did not fail."""

    HANDLED = "handled"
    """The handler ran and its effects are stored."""
    SKIPPED = "skipped"
    """The inbox already had the message, because an earlier delivery took effect."""


class RunAlone(enum.Enum):
    """The result of a delivery whose effects were rolled back, alone or with its whole shared transaction.

    The consumer calls the handler again, in a transaction with this delivery only.
    """

    RUN_ALONE = "run alone"


@dataclass(frozen=True, slots=True)
class ClaimedElsewhere:
    """The result of a delivery whose message another attempt has claimed.

    `seconds`: the time until that claim ends, if it is not renewed.
    """

    seconds: float


class MoreCalls(Protocol):
    """The waiting calls that may share the transaction of a running call (decision 198)."""

    def next(self) -> Delivery | None:
        """Return the next message to handle in this transaction; None if the transaction should end now."""

    def running(self, delivery: Delivery) -> AbstractContextManager[object]:
        """Return a context manager, inside which the handler runs for a delivery that `next` has returned."""

    def finishing(self, number: int) -> None:
        """Report that the transaction has committed, and that the callbacks of a call begin.

        `number` is 0 for the first call, 1 for the first call that has joined, and so on.
        """

    def end_sharing(self, reason: str) -> None:
        """From now on, each call of this subscription commits alone."""


class Invoker(Protocol):
    """Calls a handler inside a transaction with the inbox, and takes care of the database connections."""

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        """Return one result per delivery, in the same order. An exception as a result says that the delivery failed.

        A handler of a subscription with `batch` > 1 gets the list of deliveries, and any other handler gets one
        delivery. `generation` is the inbox generation of the consumer group. An error of the handler is returned as a
        result, and is not raised. HandlerNotStarted says that the handler was not called, so the delivery does not
        count as an attempt.
        """


class SharingInvoker(Protocol):
    """Calls a handler for several messages, one after the other, in one transaction (decision 198)."""

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, delivery: Delivery, more: MoreCalls, *, generation: int
    ) -> Sequence[Disposition | Exception | RunAlone]:
        """Return the result of `delivery`, then one result for each delivery that came from `more`, in order."""


class ClaimingInvoker(Protocol):
    """Calls a handler with effects="outside": it claims the message, and then runs the handler without a transaction.

    See decision 203.
    """

    def __call__(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        delivery: Delivery,
        claimed: Callable[[float], None],
        *,
        generation: int,
    ) -> Disposition | Exception | ClaimedElsewhere:
        """Return the result of the delivery.

        When the claim is committed, and before the handler is called, the invoker calls `claimed` with the term of the
        claim in seconds. From then on, the claim protects the message, and the lease of its queue is not needed.
        """


def call_handler(
    subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
) -> Sequence[Disposition | Exception]:
    """Call a handler without an inbox: a repeated delivery repeats the handler's effects. It implements Invoker."""
    try:
        handler(deliveries if subscription.batch > 1 else deliveries[0])  # type: ignore[arg-type]
    except PartialFailure as partial:
        errors = [partial.error_of(one.message_id) for one in deliveries]
        return [Disposition.HANDLED if error is None else error for error in errors]
    except Exception as error:
        return [error] * len(deliveries)
    return [Disposition.HANDLED] * len(deliveries)


@dataclass(frozen=True, slots=True)
class LeftoverWork:
    """The work that is left on a broker when a project moves to another engine, described in texts.

    Workers finish the work in `waiting` by themselves. The work in `staying` needs an operator.

    `written` is the number of messages that were ever written to the queues that the count has read. For an engine that
    reads one snapshot, `written` is 0. For other engines, the caller counts twice. If both counts find no message and
    have the same `written`, no message moved from one queue to another between the counts.
    """

    waiting: list[str] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)
    written: int = 0
