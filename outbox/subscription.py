"""The subscription of a consumer group to a topic, and the reactions to failing handlers.

See decision 003.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar

from outbox import names
from outbox.errors import InvalidSubscription, PermanentError, RetryLater, UndecodableBody
from outbox.retry import RetryPolicy

Value = TypeVar("Value")


class Mode(enum.StrEnum):
    """The number of messages that a group handles at a time, and their order."""

    CONCURRENT = "concurrent"
    """A group handles many messages at a time, in any order."""
    ORDERLY = "orderly"
    """A group handles one message at a time per queue, in queue order. A failing message holds up its queue."""
    KEY_ORDERED = "key_ordered"
    """A group handles one message at a time per key, in queue order. A failing message holds up only its key."""


class OnError(enum.StrEnum):
    """The reaction to a message whose handler raised an error."""

    RETRY = "retry"
    """Concurrent mode: put the message into the retry queue. Ordered modes: wait, then try it again in place."""
    SKIP = "skip"
    """Put the message into the retry queue. Later messages pass it, so an ordered mode loses its order."""
    DEAD_LETTER = "dead_letter"
    """Make the message a dead letter now."""
    STOP = "stop"
    """Stop consuming this queue until an operator resumes it. The message stays in its place."""


class Start(enum.StrEnum):
    """The message at which a consumer group that is new to a topic starts."""

    EARLIEST = "earliest"
    """The oldest message in the broker. So the group gets messages published before its first worker starts."""
    LATEST = "latest"
    """The first message that arrives after the group was created."""


def _option(default: Value, meaning: str, *, shown: str = "") -> Value:
    """Return a field with its meaning. `shown` is the default as the documents show it."""
    made: Any = field(default_factory=lambda: default, metadata={"meaning": meaning, "shown": shown})
    return made  # type: ignore[no-any-return]


def _required(meaning: str) -> str:
    made: Any = field(metadata={"meaning": meaning, "shown": "required"})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscription:
    """One consumer group's subscription to one topic.

    `filter` selects by tags (`"paid || refunded"`), or after `sql:` by an expression over headers. An empty filter
    selects all messages. The table of options in docs/guide.md has the meanings of these fields.
    """

    topic: str = _required("the topic")
    group: str = _required("the consumer group: every group gets every message")
    mode: Mode = _option(
        Mode.CONCURRENT,
        'order and what a failing message holds up: `"concurrent"`, `"key_ordered"`, `"orderly"`, [below](#order)',
    )
    filter: str = _option("", "only messages whose headers match, as in `amount > 10`", shown="all")
    start: Start | datetime = _option(
        Start.EARLIEST,
        "where a group that is new to the topic begins: at the oldest message, with messages that come from now on "
        '(`"latest"`), or with those that became visible at an aware time or later',
    )
    batch: int = _option(1, "above 1, the handler gets lists of at most so many messages, in one transaction")
    threads: int = _option(8, "handler calls that run at a time in one process")
    retry: RetryPolicy = _option(
        RetryPolicy(), "the waits between attempts, and how many there are", shown="16 attempts, 10 s … 1 h"
    )
    on_error: Mapping[type[BaseException], OnError] = _option(
        MappingProxyType({}),
        'per exception type: `"retry"`, `"skip"`, `"dead_letter"` or `"stop"`. The most specific type counts; an '
        "unlisted type is retried",
        shown="`{}`",
    )
    suspend_seconds: float = _option(1.0, "ordered modes: the pause before a failed message is tried again in place")
    max_suspends: int | None = _option(None, "ordered modes: how often it is tried again in place; `None`: no limit")
    timeout_seconds: float = _option(15 * 60.0, "a handler call that lasts longer counts as failed")
    broadcast: bool = _option(False, "`True`: every consumer process gets all messages; then there is no inbox")

    def __post_init__(self) -> None:
        names.check_group(self.group)
        names.check_topic(self.topic)
        for complaint in self._complaints():
            raise InvalidSubscription(f"subscription {self.group!r} to {self.topic!r}: {complaint}.")

    def _complaints(self) -> Iterator[str]:
        if not (_is_whole(self.batch, 1) and _is_whole(self.threads, 1)):
            yield f"batch={self.batch!r} and threads={self.threads!r} must be whole numbers and at least 1"
        if isinstance(self.start, datetime) and self.start.tzinfo is None:
            yield f"start={self.start!r} needs a time zone"
        if not isinstance(self.retry, RetryPolicy):
            yield f"retry={self.retry!r} must be a RetryPolicy, for example RetryPolicy(max_attempts=3)"
        if not isinstance(self.on_error, Mapping) or not all(map(_is_error, self.on_error)):
            yield f"on_error={self.on_error!r} must map exception classes to what happens, {{ValueError: 'skip'}}"
        if not _is_seconds(self.suspend_seconds) or self.suspend_seconds < 0:
            yield f"suspend_seconds={self.suspend_seconds!r} must be a number of seconds, not negative"
        if not _is_seconds(self.timeout_seconds) or self.timeout_seconds <= 0:
            yield f"timeout_seconds={self.timeout_seconds!r} must be a number of seconds above 0"
        if self.max_suspends is not None and not _is_whole(self.max_suspends, 0):
            yield f"max_suspends={self.max_suspends!r} must be a whole number, at least 0, or None for no limit"
        if not isinstance(self.broadcast, bool):
            yield f"broadcast={self.broadcast!r} must be True or False"

    def reaction(self, error: BaseException) -> OnError:
        """Return the reaction to `error`: the entry of its most specific type in `on_error`.

        If no type of the error is listed, PermanentError and a body that cannot be decoded become dead letters. Every
        other error is retried.
        """
        for kind in type(error).__mro__:
            if kind in self.on_error:
                return self.on_error[kind]
        return OnError.DEAD_LETTER if isinstance(error, (PermanentError, UndecodableBody)) else OnError.RETRY

    def retry_delay_seconds(self, error: BaseException, attempt: int) -> float:
        """Return the wait before the next attempt, after `attempt` (from 1) has raised `error`."""
        if isinstance(error, RetryLater):
            return self.retry.level_seconds(error.level)
        return self.retry.delay_seconds(attempt)


def _is_whole(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)
