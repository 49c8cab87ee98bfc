"""Every error of the project, in one tree.

The docstring of a class is its default message. A message says what happened, to which message or
setting, and what to do next; raise with a text of that shape wherever there is something to name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from uuid import UUID


class OutboxError(Exception):
    """Something in outbox failed."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.getdoc(type(self)) or type(self).__name__)


# -- what the caller wrote is wrong -----------------------------------------------------------------


class UsageError(OutboxError):
    """The call cannot be right as it is written."""


class ConfigurationError(UsageError):
    """A setting is missing or wrong."""


class InvalidName(UsageError):
    """A topic, group, tag, key or header name is not allowed."""


class InvalidMessage(UsageError):
    """The message cannot be sent as it is."""


class BodyTooLarge(InvalidMessage):
    """The encoded body is larger than a message may be."""


class UnserialisableBody(InvalidMessage):
    """The body cannot be encoded by the codec of its topic."""


class UndecodableBody(OutboxError):
    """The stored body cannot be decoded by the codec of its content type."""


class UnknownTopic(UsageError):
    """The topic is not declared."""


class UnknownGroup(UsageError):
    """The consumer group is not known to the broker."""


class MessageTypeMismatch(InvalidMessage):
    """The topic does not accept this type of message."""


class InvalidFilter(UsageError):
    """The filter expression cannot be parsed."""


class InvalidSubscription(UsageError):
    """The subscription contradicts itself or one already registered."""


class NotSupported(UsageError):
    """The engine behind the broker port cannot do this."""


class TransactionUsageError(UsageError):
    """The transaction a publish call belongs to cannot be determined, or cannot be used."""


# -- the broker did not do it -----------------------------------------------------------------------


class BrokerError(OutboxError):
    """The broker did not carry out a request."""


class BrokerUnavailable(BrokerError):
    """The broker's database could not be reached in time. Nothing was published."""


class SendFailed(BrokerError):
    """The message could not be stored within the deadline."""


class OutcomeUnknown(SendFailed):
    """The broker may or may not have stored the message, and cannot be asked: a resend may be a second copy."""


class TransactionalMessagesRejected(BrokerError):
    """The broker's operator has switched off new transactional messages."""


class ProducerFenced(BrokerError):
    """A newer instance of this producer has taken its transactional id; this one may not send any more."""


class LeftoversUndecided(BrokerError):
    """What an older instance of this producer left behind was not decided in time; try again."""


class TransactionTimedOut(BrokerError):
    """The transaction was open for longer than it may be; nothing of it was published."""


class SchemaError(BrokerError):
    """The broker's tables are missing, too old or too new for this code."""


class WrongDatabase(BrokerError):
    """The database is not the one that was expected."""


class LedgerUnavailable(OutboxError):
    """A database of the application that has a ledger could not be asked or changed."""


class TransactionAlreadyRolledBack(OutboxError):
    """A check-back already decided that this transaction never committed, so it must not commit now."""


class LocalTransactionRolledBack(OutboxError):
    """Raised by a local transaction that certainly did not commit: its messages are rolled back at once."""


class LeaseLost(BrokerError):
    """The lease ran out or was taken over; the work done under it must not be recorded."""


class HandlerNotStarted(OutboxError):
    """What must be there before the handler can be called is not (its database); no attempt is used up.

    An invoker returns it for deliveries whose handler it did not call; the reason is its cause.
    """


class HandlerTimedOut(OutboxError):
    """The handler ran longer than its subscription allows; its attempt counts as failed."""


class HandlersHung(OutboxError):
    """More handlers hang than threads can be replaced for: this process has given up its queues and has to end."""


class KillsItsProcess(OutboxError):
    """The process of the handler died again and again while it handled nothing but this message."""


# -- what a handler may raise -----------------------------------------------------------------------


class HandlerError(OutboxError):
    """Base of the errors by which a handler steers what happens to its message."""


class PermanentError(HandlerError):
    """No later attempt can succeed: dead-letter the message now."""


class RetryLater(HandlerError):
    """Try again after a chosen delay level instead of the next one.

    `level` counts from 1 (the first delay of the subscriber's retry policy).
    """

    def __init__(self, message: str | None = None, *, level: int) -> None:
        super().__init__(message or f"The handler asked for another attempt at delay level {level}.")
        self.level = level


class ServiceUnavailable(HandlerError):
    """What the handler needs takes nothing now, whatever the message: the subscription pauses, no attempt is used up.

    The pause grows from one second on while the handler goes on raising it; `pause_seconds` asks for another one.
    """

    def __init__(self, message: str | None = None, *, pause_seconds: float | None = None) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class PartialFailure(HandlerError):
    """Some messages of a batch failed; the others took effect.

    `errors` maps the message ids that failed to their errors. The handler must have undone the effects of
    those itself (a savepoint per message).
    """

    def __init__(self, errors: Mapping[UUID, Exception]) -> None:
        super().__init__(f"{len(errors)} messages of the batch failed: {', '.join(map(str, list(errors)[:5]))}")
        self.errors = errors
