"""Two producers that need no framework: one for plain messages, and one for transactional messages as in RocketMQ."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outbox import names, tracing
from outbox.checkback import CheckBack
from outbox.errors import BrokerError, LocalTransactionRolledBack
from outbox.message import Message, SendReceipt, refuse_options
from outbox.ports import Broker
from outbox.transaction import Answer, Check, CheckCounts, Decision, EndTransaction, HalfTransaction
from outbox.utils import log_context
from outbox.utils.faults import point
from outbox.utils.safe_text import error_line, printable

logger = logging.getLogger(__name__)


class TransactionListener(Protocol):
    """The application's two functions for a transactional message."""

    def execute_local_transaction(self, message: Message, arg: Any) -> Decision | None:
        """Run the local transaction and return its outcome. None counts as UNKNOWN."""

    def check_local_transaction(self, check: Check) -> Decision | None:
        """Look up the outcome of the local transaction of a half message. None counts as UNKNOWN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransactionReceipt:
    """The result of a transactional send: the half message's receipt, and the decision of the local transaction."""

    receipt: SendReceipt
    decision: Decision


class Producer:
    """Sends messages that are not bound to a local transaction."""

    def __init__(self, broker: Broker, *, timeout_seconds: float = 3.0) -> None:
        self._broker = broker
        self._timeout_seconds = timeout_seconds

    def send(self, message: Message) -> SendReceipt:
        """Send one message. Raises a BrokerError if the message was not stored."""
        return self.send_many([message])[0]

    def send_many(self, messages: Sequence[Message]) -> list[SendReceipt]:
        """Store all messages or none. Raises a BrokerError if no message was stored."""
        refuse_options(messages)
        with tracing.publishing(messages) as traced:
            return self._broker.send(traced, timeout_seconds=self._timeout_seconds)


class TransactionProducer:
    """Sends half messages, runs their local transactions, and answers check-backs for its group.

    All producers of a group must have the same listeners, because each producer must be able to answer checks of the
    other producers' transactions. RocketMQ's sample reports ROLLBACK for any exception. This producer reports ROLLBACK
    only for LocalTransactionRolledBack, because an error from COMMIT does not prove a rollback.
    """

    def __init__(
        self, broker: Broker, producer_group: str, listener: TransactionListener, *, timeout_seconds: float = 3.0
    ) -> None:
        self._broker = broker
        self._group = names.check_group(producer_group)
        self._listener = listener
        self._timeout_seconds = timeout_seconds

    def send_in_transaction(
        self, message: Message, arg: Any = None, *, immunity_seconds: int | None = None
    ) -> TransactionReceipt:
        """Send a half message, run the local transaction, and report its decision.

        If the half message cannot be stored, the local transaction does not run, and a BrokerError is raised. An
        exception from the local transaction is raised again. If the exception is LocalTransactionRolledBack, the
        producer reports ROLLBACK. After any other exception, or if the report is lost, check-back finds the outcome.
        """
        refuse_options([message])
        with tracing.publishing([message]) as traced:
            half = HalfTransaction(producer_group=self._group, messages=traced, immunity_seconds=immunity_seconds)
            point("producer.before_half")
            receipt = self._broker.send_half(half, timeout_seconds=self._timeout_seconds)[0]
        point("producer.after_half")
        try:
            decision = self._listener.execute_local_transaction(message, arg) or Decision.UNKNOWN
        except LocalTransactionRolledBack:
            self._end(half, Decision.ROLLBACK)
            raise
        point("producer.before_end")
        self._end(half, decision)
        point("producer.after_end")
        return TransactionReceipt(receipt=receipt, decision=decision)

    def check_back(self) -> CheckCounts:
        """Answer the broker's due checks for this group.

        Call this method periodically in at least one producer of the group.
        """
        return CheckBack(self._broker, self._group, _ListenerChecker(self._listener)).run_once()

    def _end(self, half: HalfTransaction, decision: Decision) -> None:
        if decision is Decision.UNKNOWN:
            return
        if tracing.tracer is not None:
            tracing.tracer.decided(half, decision)
        end = EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group=self._group)
        try:
            self._broker.end([end], timeout_seconds=self._timeout_seconds)
        except BrokerError as error:
            # A lost report is no error of the protocol: the local transaction stays committed, and check-back finds its
            # outcome.
            logger.warning(
                "the decision of transaction %s could not be reported, check-back will find it: %s",
                half.transaction_id,
                error,
                extra=log_context.about_half(half),
            )


class _ListenerChecker:
    """Passes the checks to a TransactionListener, one check per call."""

    def __init__(self, listener: TransactionListener) -> None:
        self._listener = listener

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        for check in checks:
            try:
                decision = self._listener.check_local_transaction(check) or Decision.UNKNOWN
                detail = f"listener answered {decision.name}"
            except Exception as error:
                logger.error(
                    "checking %s failed",
                    check.transaction_id,
                    extra=log_context.about_check(check),
                    exc_info=printable(error),
                )
                decision, detail = Decision.UNKNOWN, f"listener raised {error_line(error)}"
            yield Answer(transaction_id=check.transaction_id, decision=decision, detail=detail)
