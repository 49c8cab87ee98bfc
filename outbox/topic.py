"""Declared topics: their message types and their number of queues."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from outbox import names
from outbox.errors import ConfigurationError, InvalidMessage, MessageTypeMismatch
from outbox.message import Message
from outbox.time_limit import TIMEOUT_HEADER

DEFAULT_RETENTION_SECONDS = 3 * 24 * 3600
MAX_QUEUE_COUNT = 1024


class MessageType(enum.StrEnum):
    """A kind of message that a topic may carry.

    A message can have several of these types, but a NORMAL message is not FIFO and not DELAY.
    """

    NORMAL = "NORMAL"
    """Messages without an order, which are delivered at once."""
    FIFO = "FIFO"
    """Messages in order per key. Every message of the topic needs a key."""
    DELAY = "DELAY"
    """Messages that may have a delivery time."""
    TRANSACTION = "TRANSACTION"
    """Messages that may be half messages of a local transaction.

    A topic with only this type accepts no messages outside of a local transaction.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """A declared topic.

    `queue_count` is the largest number of instances of a group that can consume the topic at the same time. If
    `queue_count` is 1, all messages of the topic are in one order. With `key_lock`, publishing to a FIFO topic locks
    the key in the local transaction, so that the order in the queue is the order of commits in one database. Without
    `key_lock`, the order in the queue is the order of commits only for transactions that do not overlap in time. If a
    message of a FIFO topic is parked, `on_park` = 'hold' makes the next messages of its key wait, and 'release'
    delivers these messages. Consumed messages are removed after `retention_seconds`. `backlog_limit` is the greatest
    number of messages that a group may be behind. While it is exceeded, publishing raises TopicOverLimit if `on_limit`
    is 'refuse', and logs a warning if it is 'warn'. With `searchable`, the installation makes an index of the topic's
    keys. Raises ConfigurationError.
    """

    name: str
    types: frozenset[MessageType] = frozenset({MessageType.NORMAL, MessageType.TRANSACTION})
    queue_count: int = 8
    key_lock: bool = True
    on_park: str = "hold"
    retention_seconds: int = DEFAULT_RETENTION_SECONDS
    backlog_limit: int | None = None
    on_limit: str = "refuse"
    searchable: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", names.check_topic(self.name))
        if isinstance(self.types, str):
            raise ConfigurationError(
                f"topic {self.name!r}: types={self.types!r} must be a set, such as frozenset({{MessageType.FIFO}})."
            )
        for one in self.types:
            if right := names.right_choice(MessageType, one):
                raise ConfigurationError(f"topic {self.name!r}: types has {one!r}, which must be {right}.")
        if not self.types:
            raise ConfigurationError(f"topic {self.name!r}: declare at least one of {', '.join(MessageType)}.")
        if not 1 <= self.queue_count <= MAX_QUEUE_COUNT:
            raise ConfigurationError(
                f"topic {self.name!r}: queue_count must be 1 to {MAX_QUEUE_COUNT}, got {self.queue_count}."
            )
        if not 1 <= self.retention_seconds <= names.MAX_INTEGER:
            raise ConfigurationError(
                f"topic {self.name!r}: retention_seconds must be at least 1 and at most {names.MAX_INTEGER:,}, got "
                f"{self.retention_seconds}."
            )
        if self.backlog_limit is not None and not 1 <= self.backlog_limit < 2**63:
            raise ConfigurationError(
                f"topic {self.name!r}: backlog_limit must be at least 1 and below 2**63, got {self.backlog_limit}."
            )
        if self.on_limit not in ("refuse", "warn"):
            raise ConfigurationError(
                f"topic {self.name!r}: on_limit must be 'refuse' or 'warn', got {self.on_limit!r}."
            )
        if self.on_park not in ("hold", "release"):
            raise ConfigurationError(f"topic {self.name!r}: on_park must be 'hold' or 'release', got {self.on_park!r}.")

    @property
    def is_fifo(self) -> bool:
        """Whether messages are ordered by key."""
        return MessageType.FIFO in self.types

    @property
    def needs_transaction(self) -> bool:
        """Whether the topic accepts transactional messages only."""
        return self.types == {MessageType.TRANSACTION}

    def check_accepts(self, message: Message, *, transactional: bool | None) -> None:
        """Do the same as `check_accepts_all` for one message."""
        self.check_accepts_all((message,), transactional=transactional)

    def check_accepts_all(self, messages: Sequence[Message], *, transactional: bool | None) -> None:
        """Raise MessageTypeMismatch or InvalidMessage if the topic does not accept all these messages in this form.

        `transactional` is True if the messages are bound to an open local transaction, and False if the messages are
        bound to no transaction. `transactional` is None if their local transaction has already committed (a repair).
        """
        if transactional and MessageType.TRANSACTION not in self.types:
            raise self._mismatch("a transactional message", MessageType.TRANSACTION)
        if transactional is False and self.needs_transaction:
            raise MessageTypeMismatch(
                f"topic {self.name!r} is declared TRANSACTION only: message {messages[0].message_id} must be bound to "
                f"a local transaction. Publish it inside `with transaction.atomic():`, or from @transactional_message. "
                f"Or add NORMAL to the topic's types."
            )
        is_fifo, takes_delayed = self.is_fifo, MessageType.DELAY in self.types
        only_delayed = takes_delayed and not is_fifo and MessageType.NORMAL not in self.types
        for message in messages:
            is_delayed = message.deliver_at is not None or message.delay is not None
            if is_delayed and not takes_delayed:
                raise self._mismatch("a message with a delivery time", MessageType.DELAY)
            if is_fifo and not message.key:
                raise InvalidMessage(
                    f"topic {self.name!r} is FIFO: message {message.message_id} needs a key, because a FIFO "
                    "topic has an order per key."
                )
            if only_delayed and not is_delayed:
                raise InvalidMessage(
                    f"topic {self.name!r} takes delayed messages only: give message {message.message_id} a delay or "
                    f"deliver_at, or declare the topic NORMAL too."
                )
            if message.headers and TIMEOUT_HEADER in message.headers:
                self._check_timeout(message)

    def _check_timeout(self, message: Message) -> None:
        timeout = message.timeout
        if timeout is not None and timeout.total_seconds() > self.retention_seconds:
            raise InvalidMessage(
                f"message {message.message_id} for topic {self.name!r} has a time limit of "
                f"{timeout.total_seconds():g} s, but the topic keeps messages for {self.retention_seconds} s: pass a "
                "shorter timeout, or declare the topic with a longer retention."
            )

    def _mismatch(self, what: str, needed: MessageType) -> MessageTypeMismatch:
        return MessageTypeMismatch(
            f"topic {self.name!r} is declared {'+'.join(sorted(self.types))} and does not take {what}: "
            f"add {needed} to its types."
        )


def select_shard(message: Message) -> int | None:
    """Return the shard of a message: its own `shard`, else a hash of the key, else None.

    The hash is CRC-32 of the UTF-8 key, so it is the same in every process, language and release.
    """
    if message.shard is not None:
        return message.shard
    return zlib.crc32(message.key.encode()) & 0x7FFFFFFF if message.key else None
