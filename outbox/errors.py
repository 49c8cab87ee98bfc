"""All errors of the project, in one class hierarchy.

The docstring of a class is the default text of its errors. An error text says what happened (with the message id or
setting), why, and what to do next. If an id or a name is known, raise the error with a text that contains this id or
name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar
from uuid import UUID

from outbox.utils.safe_text import shown_value


class OutboxError(Exception):
    """Something in outbox failed."""

    # Whether the missing body of an erased message may be the cause. If not, the error has its usual effect.
    may_concern_body: ClassVar[bool] = True

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.getdoc(type(self)) or type(self).__name__)


# -- errors of the caller ------------------------------------------------------------------------------


class UsageError(OutboxError):
    """The call is invalid: its arguments or its place in the code are wrong."""


class ConfigurationError(UsageError):
    """A setting is missing or wrong."""


class InvalidName(UsageError):
    """A topic, group, tag, key or header name is not allowed."""


class InvalidMessage(UsageError):
    """The message cannot be sent in this form."""


class BodyTooLarge(InvalidMessage):
    """The encoded body is larger than the limit for messages."""


class UnserialisableBody(InvalidMessage):
    """The body cannot be encoded by the codec of its topic."""


class UndecodableBody(OutboxError):
    """The stored body cannot be decoded by the codec of its content type."""


class MissingBody(UndecodableBody):
    """The object with the body of a large message is not in the storage."""


class UnknownTopic(UsageError):
    """The topic is not declared."""


class UnknownGroup(UsageError):
    """The consumer group is not known to the broker."""


class MessageTypeMismatch(InvalidMessage):
    """The topic does not accept this type of message."""


class InvalidFilter(UsageError):
    """The filter expression cannot be parsed."""


class InvalidSubscription(UsageError):
    """The subscription contradicts itself, or a subscription that is already registered."""


class InconsistentSubscription(InvalidSubscription):
    """Other live consumers of the group use another mode or filter for the topic.

    A worker does not raise this error. It waits until these consumers have ended, so that a rolling deployment ends.
    """


class NotSupported(UsageError):
    """The engine of this broker does not support this call."""


class TransactionUsageError(UsageError):
    """The transaction of a publish call cannot be determined or cannot be used."""


class TransactionRequired(TransactionUsageError):
    """The publish call needs an open transaction, or `at_once=True`. Nothing was published."""


# -- errors of the broker ------------------------------------------------------------------------------


class BrokerError(OutboxError):
    """The broker did not carry out a request."""


class BrokerUnavailable(BrokerError):
    """The broker's database could not be reached in time. Nothing was published."""


class SendFailed(BrokerError):
    """The message could not be stored within the deadline."""


class OutcomeUnknown(SendFailed):
    """The broker may have stored the message and does not answer: sending it again may store a second copy."""


class TransactionalMessagesRejected(BrokerError):
    """The operator has switched off new transactional messages on the broker."""


class TopicOverLimit(BrokerError):
    """A limit of the topic is exceeded, so it takes no messages now. Nothing was published."""


class ProducerFenced(BrokerError):
    """A newer instance of this producer has taken its transactional id. This instance may not send any more."""


class LeftoversUndecided(BrokerError):
    """Transactions of an older instance of this producer were not decided in time. Try again."""


class SchemaError(BrokerError):
    """The broker's tables are missing, too old or too new for this code."""


class WrongDatabase(BrokerError):
    """The connection leads to another database than expected."""


class LedgerUnavailable(OutboxError):
    """An application database with a ledger could not be read or changed."""


class TransactionAlreadyRolledBack(OutboxError):
    """A check-back has already decided that this transaction rolled back, so it must not commit now."""


class LeaseLost(BrokerError):
    """The lease has expired or belongs to another consumer now. The former owner's work must not be recorded."""

    may_concern_body = False


class HandlerNotStarted(OutboxError):
    """A precondition of the handler, such as its database, is not available, so no attempt was counted.

    An invoker returns this error for each delivery whose handler it did not call. The error's `__cause__` is the reason
    why the handler was not called.
    """

    may_concern_body = False


class NeedsNewerCode(HandlerNotStarted):
    """Newer code has published the message, and this process cannot read it.

    The message waits, without an attempt, for a process that can.
    """


class HandlerTimedOut(OutboxError):
    """The handler ran longer than its subscription allows, so the attempt counts as failed."""


class HandlersHung(OutboxError):
    """So many handlers hang that their threads cannot be replaced. This process released its queues and must end."""


class KillsItsProcess(OutboxError):
    """The handler's process died repeatedly while it handled only this message."""


# -- errors that a handler may raise -------------------------------------------------------------------


class HandlerError(OutboxError):
    """Base of the errors with which a handler chooses what happens to its message."""


class PermanentError(HandlerError):
    """No further attempt can succeed, so the message becomes a dead letter now."""


class RetryLater(HandlerError):
    """Try again after a chosen delay level instead of the next delay level.

    `level` counts from 1 (the first delay of the subscriber's retry policy).
    """

    # A subclass may omit to call the constructor.
    level: int = 1

    def __init__(self, message: str | None = None, *, level: int) -> None:
        super().__init__(message or f"The handler asked for another attempt at delay level {level}.")
        self.level = level


class ServiceUnavailable(HandlerError):
    """A resource that the handler needs for every message is down, so the subscription pauses.

    The call that raised this error does not count as an attempt.

    The pause starts at one second and grows while the handler raises this error again. `pause_seconds` sets another
    pause.
    """

    may_concern_body = False
    pause_seconds: float | None = None

    def __init__(self, message: str | None = None, *, pause_seconds: float | None = None) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class StepOutcomeUnknown(HandlerError):
    """An earlier attempt began this step with once=True, and stored no result: the function raised an error, or the
    process died. So the outcome is unknown.

    The step is not run again. Find out from the other system what the step has done, and continue accordingly.
    """


class PartialFailure(HandlerError):
    """Some messages of a batch failed. The effects of all other messages of the batch remain.

    `errors` maps the ids of the failed messages to their errors. The handler must have undone the effects of the failed
    messages itself, for example with a savepoint per message.
    """

    errors: Mapping[UUID, Exception] = MappingProxyType({})

    def __init__(self, errors: Mapping[UUID, Exception]) -> None:
        super().__init__(f"{len(errors)} messages of the batch failed: {', '.join(map(str, list(errors)[:5]))}")
        self.errors = errors

    def error_of(self, message_id: UUID) -> Exception | None:
        """Return the error of a message, or None if the message did not fail."""
        if message_id not in self.errors:
            return None
        # A handler may report a text by mistake, which is a failure too.
        reported: object = self.errors[message_id]
        if isinstance(reported, Exception):
            return reported
        return HandlerError(f"PartialFailure.errors has no exception for message {message_id}: {shown_value(reported)}")
