"""The value types of messages, receipts and deliveries."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic
from uuid import UUID, uuid5

from outbox import names
from outbox.codec import OWN_CONTENT_TYPES, UnreadBody
from outbox.erased import ERASED
from outbox.errors import InvalidMessage, InvalidName, UsageError
from outbox.time_limit import TIMEOUT_HEADER, timeout_of
from outbox.utils.ids import uuid7
from outbox.utils.safe_text import shown_value

if TYPE_CHECKING:
    # Type checkers know typing_extensions without the package. Only its TypeVar has a default before Python 3.13.
    from typing_extensions import TypeVar

    Body_co = TypeVar("Body_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Body_co = TypeVar("Body_co", covariant=True)

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message to send: an encoded body, its topic and its routing.

    `message_id` is the idempotency key of a send: a message that is sent twice with one id is stored once. `key` orders
    messages on FIFO topics, and names the business object on other topics. `shard` chooses the queue (shard modulo
    queue count). If `shard` is None, the broker spreads messages evenly over the queues. `deliver_at` is the earliest
    time of delivery by the broker's clock, with a time zone. `delay` counts from the time at which the broker stores
    the message: the broker adds `delay` to this time, and so computes `deliver_at`. The header `outbox-timeout` is the
    message's time limit (seconds, see `timeout`). Raises InvalidName, InvalidMessage or BodyTooLarge if the message
    cannot be sent.
    """

    topic: str
    body: bytes
    message_id: UUID = field(default_factory=uuid7)
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)
    content_type: str = "application/json"
    deliver_at: datetime | None = None
    delay: timedelta | None = None
    shard: int | None = None
    born_at: datetime = field(default_factory=partial(datetime.now, UTC))

    def __post_init__(self) -> None:
        # Each publish call runs these checks, so ordinary values cost no call.
        key = self.key
        if type(self.topic) is not str or not names.is_identifier(self.topic):
            object.__setattr__(self, "topic", names.check_topic(self.topic))
        try:
            if type(key) is not str or len(key) > names.MAX_KEY or not key.isascii() or "\x00" in key:
                object.__setattr__(self, "key", names.check_key(key))
            if type(self.tag) is not str or self.tag:
                object.__setattr__(self, "tag", names.check_tag(self.tag))
            if self.headers:
                names.check_headers(self.headers)
        except InvalidName as error:
            raise InvalidName(f"message for topic {self.topic!r}: {error}") from None
        if not isinstance(self.body, bytes):
            raise InvalidMessage(f"the body for topic {self.topic!r} must be bytes; encode it with a codec first.")
        if len(self.body) > names.MAX_BODY_BYTES:
            names.check_body_size(self.topic, self.body)
        if TIMEOUT_HEADER in self.headers:
            _check_timeout(self.topic, self.headers[TIMEOUT_HEADER], self.timeout)
        if self.deliver_at is not None:
            _check_deliver_at(self.topic, self.deliver_at)
        if self.delay is not None:
            _check_delay(self.topic, self.delay, self.deliver_at)

    @property
    def is_delayed(self) -> bool:
        """Whether the message has a delivery time."""
        return self.deliver_at is not None or self.delay is not None

    @property
    def timeout(self) -> timedelta | None:
        """The message's time limit, which counts from the time at which the message is due; None without a limit.

        No attempt to deliver the message begins after the limit.
        """
        return timeout_of(self.headers)


def stored_message(**fields: Any) -> Message:
    """Return a message that the broker has stored, without the checks of a new one.

    A program beside outbox may have stored a message that the checks refuse, and its row must not fail other rows.
    """
    message = object.__new__(Message)
    for name in Message.__dataclass_fields__:
        object.__setattr__(message, name, fields.get(name))
    return message


def _check_timeout(topic: str, text: str, timeout: timedelta | None) -> None:
    if not timeout:
        raise InvalidMessage(
            f"header {TIMEOUT_HEADER!r}={text!r:.80} for topic {topic!r} must be a positive number of seconds, such as "
            "'30' or '0.5': outbox reads this header as the time limit of the message. Pass timeout= to publish, or "
            "give the header another name."
        )


# The range of the functions of the broker that append messages: a day less than that of Python.
_FIRST: Final = datetime(1, 1, 2, tzinfo=UTC)
_LAST: Final = datetime(9999, 12, 30, tzinfo=UTC)


def _check_deliver_at(topic: str, moment: object) -> None:
    if not isinstance(moment, datetime):
        raise InvalidMessage(
            f"deliver_at={shown_value(moment)} for topic {topic!r} must be a datetime with a time zone."
        )
    if moment.tzinfo is None:
        raise InvalidMessage(
            f"deliver_at={moment!r} for topic {topic!r} has no time zone: pass an aware datetime "
            "(django.utils.timezone.now(), datetime.now(UTC))."
        )
    if not _FIRST <= moment <= _LAST:
        raise InvalidMessage(
            f"deliver_at={moment!r} for topic {topic!r} is not between {_FIRST.date()} and {_LAST.date()}: in some "
            "time zones it is beyond the years 1 to 9999. Pass a time in this range."
        )


def _check_delay(topic: str, delay: object, deliver_at: datetime | None) -> None:
    if deliver_at is not None:
        raise InvalidMessage(f"a message for topic {topic!r} has both delay and deliver_at: give only one of them.")
    if not isinstance(delay, timedelta):
        raise InvalidMessage(f"delay={delay!r:.80} for topic {topic!r} must be a timedelta.")
    if delay < timedelta(0):
        raise InvalidMessage(f"delay={delay!r} for topic {topic!r} must not be negative.")
    if delay >= _LAST - datetime.now(UTC):
        raise InvalidMessage(f"delay={delay!r} for topic {topic!r} ends after {_LAST.date()}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageWithOptions(Message):
    """A message with options that act when it is stored (`outbox.hooks.Option.admit`), so it needs a transaction."""

    options: Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReceipt:
    """Proof that the broker has stored a message, or that the message is a duplicate.

    `position` is the message's address in the broker. Do not interpret `position`: it is the log id in the PostgreSQL
    broker, a text in another broker, and None if the broker has no such address.

    If an option of the message has found that it is a duplicate, `duplicate_of` is the id of the other message. The
    broker has then not stored this message, and no group gets a message with the id `message_id`.
    """

    message_id: UUID
    transaction_id: UUID
    topic: str
    position: int | str | None = None
    duplicate_of: UUID | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery(Generic[Body_co]):
    """One message that a consumer passes to one handler.

    `body` is decoded by the codec of the message's content type. For a handler with an annotation like
    `Delivery[OrderPaid]`, `body` is a value of this type. If the message is erased, `body` is outbox.erased.ERASED.
    A large body is read from its storage when `body` is first used; `open_body` reads it in pieces.
    `attempt` counts from 1. The message was read at
    `offset` of `queue` for the consumer group. `transaction_id` is the transaction id of the publish call (see
    SendReceipt), or None if the broker does not give it.
    """

    message: Message
    body: Body_co
    group: str
    queue: str
    offset: int
    attempt: int = 1
    transaction_id: UUID | None = None
    # Decodes the body of `message` once more (see `afresh`). It is None for a delivery that the application has made.
    _decode: Callable[[Message], Any] | None = field(default=None, repr=False, compare=False)
    # A slot without a value, except for a large body. So other messages cost nothing.
    _unread: UnreadBody | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.body, UnreadBody):
            object.__setattr__(self, "_unread", self.body)
            object.__delattr__(self, "body")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Python calls this method only for a slot without a value.
            if name == "_unread":
                return None
            if name != "body" or self._unread is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            body = self._unread.read()
            object.__setattr__(self, "body", body)
            return body

    def open_body(self) -> BinaryIO:
        """Return a binary file of the encoded body: what the codec of the topic made of it.

        A large body is read in pieces from its storage. Reading raises UndecodableBody at the end if the object was
        changed. Raises MissingBody if the object is gone. Raises UsageError if the body is erased, stored in
        the form of another part, or already decoded to a value.
        """
        if self._unread is not None:
            return self._unread.open()
        if self.erased or self.message.content_type.startswith(OWN_CONTENT_TYPES):
            raise UsageError(
                f"open_body of message {self.message_id}: the body is erased, stored as "
                f"{self.message.content_type!r}, or already decoded to a value, so it cannot be read in pieces. Use "
                "delivery.body."
            )
        return io.BytesIO(self.message.body)

    def fields(self) -> dict[str, Any]:
        """Return the values from which a copy of this delivery can be made, without those of a derived class.

        A large body stays unread.
        """
        names = (name for name, one in Delivery.__dataclass_fields__.items() if one.init)
        return {
            name: self._unread if name == "body" and self._unread is not None else getattr(self, name) for name in names
        }

    @property
    def message_id(self) -> UUID:
        """The id that the producer gave the message; it is the same on every attempt."""
        return self.message.message_id

    @property
    def topic(self) -> str:
        """The topic to which the message was published, even if it comes from a retry queue."""
        return self.message.topic

    @property
    def key(self) -> str:
        """The message's key, or an empty text."""
        return self.message.key

    @property
    def tag(self) -> str:
        """The message's tag, or an empty text."""
        return self.message.tag

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers."""
        return self.message.headers

    @property
    def erased(self) -> bool:
        """Whether an operator erased the body, or deleted the key that it needs."""
        return self._unread is None and self.body is ERASED

    @property
    def idempotency_key(self) -> str:
        """A key that another system can use to recognise a repeated request for this message and group.

        The key is the same on every attempt, after a replay, and with every engine. Another group has another key.
        """
        return str(uuid5(self.message_id, self.group))


def afresh(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return the deliveries for another call of the handler, each with a body of its own.

    The body is decoded again, because the earlier call may have changed the object that it got. Raises UndecodableBody,
    NeedsNewerCode or HandlerNotStarted as the first decoding does.
    """
    return [
        one if one._decode is None else Delivery(**{**one.fields(), "body": one._decode(one.message)})
        for one in deliveries
    ]
