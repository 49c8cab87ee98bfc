"""The subscription of a consumer group to a topic, and the reactions to failing handlers.

See decision 003.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from outbox import hooks, names
from outbox.errors import (
    HandlerError,
    InvalidSubscription,
    PermanentError,
    RetryLater,
    ServiceUnavailable,
    UndecodableBody,
)
from outbox.retry import RetryPolicy
from outbox.utils.safe_text import class_name, error_line, show_as, shown_text, traceback_of

if TYPE_CHECKING:
    from outbox.message import Message

Value = TypeVar("Value")

DEFAULT_THREADS: Final = 8


class Mode(enum.StrEnum):
    """How many messages a group handles at the same time, and in which order."""

    CONCURRENT = "concurrent"
    """A group handles many messages at the same time, in any order."""
    ORDERLY = "orderly"
    """At any time, a group handles at most one message per queue, in queue order.

    A failing message blocks its queue.
    """
    KEY_ORDERED = "key_ordered"
    """At any time, a group handles at most one message per key, in queue order.

    A failing message blocks only its key.
    """


class OnError(enum.StrEnum):
    """The reaction to a message whose handler raised an error."""

    RETRY = "retry"
    """In concurrent mode, put the message into the retry queue. In ordered modes, wait, then try the message again."""
    RETRY_LATER = "retry_later"
    """Put the message into the retry queue.

    The group handles the next messages before this message, so an ordered mode loses its order.
    """
    DEAD_LETTER = "dead_letter"
    """Make the message a dead letter now."""
    STOP = "stop"
    """Stop consuming the queue until an operator resumes the queue. The message stays at its place."""


class Effects(enum.StrEnum):
    """Where the effects of a handler are."""

    INSIDE = "inside"
    """The effects are in the database of the inbox: the handler runs in one transaction with the inbox row."""
    OUTSIDE = "outside"
    """The handler also calls other systems: it runs without an open transaction, and its message is claimed."""


class Start(enum.StrEnum):
    """The message at which a consumer group that is new to a topic starts."""

    EARLIEST = "earliest"
    """The oldest message in the broker.

    So the group also gets messages that were published before its first worker started.
    """
    LATEST = "latest"
    """The first message that arrives after the group was created."""


def _option(default: Value, meaning: str, *, shown: str = "") -> Value:
    """Return a dataclass field with `meaning` in its metadata. `shown` is the default as the documents show it."""
    made: Any = field(default_factory=lambda: default, metadata={"meaning": meaning, "shown": shown})
    return made  # type: ignore[no-any-return]


def _required(meaning: str) -> str:
    made: Any = field(metadata={"meaning": meaning, "shown": "required"})
    return made  # type: ignore[no-any-return]


class SubscriptionOption:
    """The base class of the options that parts declare, for `Subscription(options=[…])`.

    The core does not know what an option means. It asks the option whether it fits the subscription, and calls the
    hooks that the part has added for its class (outbox/hooks.py).

    If `reads` is true, the option makes the bodies for the handler.
    """

    __slots__ = ()

    reads: ClassVar[bool] = False

    def read(self, topic: str, headers: Mapping[str, str], body: Any) -> Any:
        """Return the body for the handler, made of the decoded body of a message.

        Raises UndecodableBody, or NeedsNewerCode if the message shall wait for newer code.
        """
        return body

    def complaints(self, subscription: Subscription) -> Iterator[str]:
        """Yield why the option does not fit the subscription."""
        yield from ()

    @property
    def waits_for_key(self) -> bool:
        """Whether messages may wait for others of their key, although the subscription handles them in any order."""
        return False

    @property
    def has_lane(self) -> bool:
        """Whether the messages wait in the lane that the part has added with `hooks.add_lane`, in concurrent mode."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscription:
    """One consumer group's subscription to one topic.

    `filter` selects messages by tags (`"paid || refunded"`). If `filter` starts with `sql:`, the text after `sql:` is
    an expression over headers. An empty filter selects all messages. The table of options in docs/handlers.md explains
    all fields of this class.
    """

    topic: str = _required("the topic")
    group: str = _required("the consumer group: every group gets every message")
    mode: Mode = _option(
        Mode.CONCURRENT,
        "the [order](order-and-delay.md#order) of the messages, and which messages a failing message blocks: "
        '`"concurrent"`, `"key_ordered"`, `"orderly"`',
    )
    filter: str = _option(
        "", "the handler gets only messages whose headers match this expression, as in `amount > 10`", shown="all"
    )
    start: Start | datetime = _option(
        Start.EARLIEST,
        'where a new group begins: at the oldest message, at the next new message (`"latest"`), or at the first '
        "message that became visible at or after an aware `datetime`",
    )
    batch: int = _option(
        1, "with a number above 1, the handler gets a list of at most this number of messages, in one transaction"
    )
    threads: int = _option(DEFAULT_THREADS, "how many calls of the handler may run at the same time in one process")
    retry: RetryPolicy = _option(
        RetryPolicy(), "the waits between attempts, and the number of attempts", shown="16 attempts, 10 s … 1 h"
    )
    on_error: Mapping[type[BaseException], OnError] = _option(
        MappingProxyType({}),
        'the reaction per exception type: `"retry"`, `"retry_later"`, `"dead_letter"` or `"stop"`. The most specific '
        "type decides; an error of an unlisted type is retried",
        shown="`{}`",
    )
    suspend_seconds: float = _option(
        1.0, "ordered modes: the pause before a failed message is tried again at its place"
    )
    max_suspends: int | None = _option(
        None, "ordered modes: how often a failed message is tried again at its place; `None`: no limit"
    )
    timeout_seconds: float = _option(15 * 60.0, "a handler call that lasts longer than this time counts as failed")
    effects: Effects = _option(
        Effects.INSIDE,
        '`"outside"`: the handler calls other systems, so it runs [without an open transaction](slow-calls.md)',
    )
    broadcast: bool = _option(False, "`True`: every consumer process gets all messages, and there is no inbox")
    options: Sequence[SubscriptionOption] = _option(
        (), "the options of optional apps, such as [`Limits(…)`](limits.md)", shown="`[]`"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", names.check_group(self.group))
        object.__setattr__(self, "topic", names.check_topic(self.topic))
        for complaint in self._complaints():
            raise InvalidSubscription(f"subscription {self.group!r} to {self.topic!r}: {complaint}.")

    def _complaints(self) -> Iterator[str]:
        if not all(names.is_whole(one, 1, names.MAX_CALLS) for one in (self.batch, self.threads)):
            most = f"{names.MAX_CALLS:,}"
            yield f"batch={self.batch!r} and threads={self.threads!r} must be whole numbers from 1 to {most}"
        if right := names.right_choice(Mode, self.mode):
            yield f"mode={self.mode!r} must be {right}"
        if isinstance(self.start, datetime):
            if self.start.tzinfo is None:
                yield f"start={self.start!r} needs a time zone"
        elif right := names.right_choice(Start, self.start):
            other = "" if isinstance(self.start, str) else " or a datetime with a time zone"
            yield f"start={self.start!r} must be {right}{other}"
        if not isinstance(self.retry, RetryPolicy):
            yield f"retry={self.retry!r} must be a RetryPolicy, for example RetryPolicy(max_attempts=3)"
        if not isinstance(self.on_error, Mapping) or not all(map(_is_error, self.on_error)):
            yield (
                f"on_error={self.on_error!r} must map exception classes to reactions, as in "
                "{ValueError: OnError.STOP}"
            )
        else:
            for kind, reaction in self.on_error.items():
                if right := names.right_choice(OnError, reaction):
                    yield f"on_error[{kind.__qualname__}]={reaction!r} must be {right}"
        most = f"at most {names.MAX_WAIT_SECONDS:,} (24 days)"
        if not names.is_seconds(self.suspend_seconds):
            yield f"suspend_seconds={self.suspend_seconds!r} must be a number of seconds, 0 or more and {most}"
        if not names.is_seconds(self.timeout_seconds) or not self.timeout_seconds:
            yield f"timeout_seconds={self.timeout_seconds!r} must be a number of seconds above 0 and {most}"
        if self.max_suspends is not None and not names.is_whole(self.max_suspends, 0):
            yield (
                f"max_suspends={self.max_suspends!r} must be a whole number from 0 to {names.MAX_INTEGER:,}, or None "
                "for no limit"
            )
        if not isinstance(self.broadcast, bool):
            yield f"broadcast={self.broadcast!r} must be True or False"
        yield from self._complaints_about_options()
        yield from self._complaints_about_effects()

    def _complaints_about_options(self) -> Iterator[str]:
        if isinstance(self.options, str) or not isinstance(self.options, Sequence):
            yield f"options={self.options!r} must be a list of options of parts"
            return
        for option in self.options:
            if isinstance(option, SubscriptionOption):
                yield from option.complaints(self)
            else:
                yield f"options has {option!r}, which is no option of a part"
        if len(admitting := [option for option in self.options if type(option) in hooks.admissions]) > 1:
            yield f"only one option may decide when handler calls start, but options has {admitting}"
        if len(choosing := [option for option in self.options if getattr(option, "has_lane", False)]) > 1:
            yield f"only one option may decide which message is next, but options has {choosing}"
        if len(reading := [option for option in self.options if getattr(option, "reads", False)]) > 1:
            yield f"only one option may make the bodies for the handler, but options has {reading}"

    def _complaints_about_effects(self) -> Iterator[str]:
        if right := names.right_choice(Effects, self.effects):
            yield f"effects={self.effects!r} must be {right}"
        elif self.effects is Effects.OUTSIDE:
            yield from self._complaints_of_claims()

    def _complaints_of_claims(self) -> Iterator[str]:
        if self.batch != 1:
            yield f"effects='outside' claims one message at a time, so batch={self.batch} is not possible: remove batch"
        if self.broadcast:
            yield (
                "effects='outside' lets one process of the group claim a message, so broadcast=True is not possible: "
                "give every instance a group of its own"
            )
        if isinstance(self.on_error, Mapping) and OnError.STOP in self.on_error.values():
            yield (
                "with effects='outside', a message leaves its queue while its handler runs, so the handler cannot "
                "stop the queue: use 'retry' or 'dead_letter' instead of 'stop'"
            )

    @property
    def reader(self) -> SubscriptionOption | None:
        """The option that makes the bodies for the handler; None if the handler gets the decoded bodies."""
        for option in self.options:
            if option.reads:
                return option
        return None

    def decoder(self, decode: Callable[[str, bytes], Any]) -> Callable[[Message], Any]:
        """Return a function that makes the body for the handler of a message.

        `decode` is `Codecs.decode`. The function raises the errors of `decode` and of `SubscriptionOption.read`.
        """
        reader = self.reader

        def decode_body(message: Message) -> Any:
            body = decode(message.content_type, message.body)
            return body if reader is None else reader.read(message.topic, message.headers, body)

        return decode_body

    def reaction(self, error: BaseException) -> OnError:
        """Return the reaction to `error`: the entry in `on_error` for the most specific type of the error.

        If `on_error` lists no type of the error, the reaction to PermanentError and to a body that cannot be decoded is
        DEAD_LETTER. The reaction to every other error is RETRY.
        """
        for kind in type(error).__mro__:
            if kind in self.on_error:
                return self.on_error[kind]
        return OnError.DEAD_LETTER if isinstance(error, (PermanentError, UndecodableBody)) else OnError.RETRY

    def contained(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a handler call, in which each error can be examined and its text is known.

        An error is a value from outside: its `__str__` may raise or query a database, and `RetryLater.level` may be a
        text. Call this method in the thread of the handler, so that such an error fails its own message only.
        """
        made: dict[int, BaseException] = {}
        for one in results:
            if isinstance(one, BaseException) and id(one) not in made:
                made[id(one)] = self._examined(one)
        return [made.get(id(one), one) for one in results] if made else results

    def _examined(self, error: BaseException) -> BaseException:
        """Return the error, or an error that stands for it, if the engine could not decide what to do with it."""
        text = shown_text(error)
        try:
            self.reaction(error)
            self.retry_delay_seconds(error, 1)
            pause = error.pause_seconds if isinstance(error, ServiceUnavailable) else None
            if pause is not None and not names.is_seconds(pause, names.MAX_DELAY_SECONDS):
                raise ValueError("pause_seconds is not a number of seconds, or longer than a year")
        except Exception as further:
            return HandlerError(
                f"the handler raised {class_name(error)}, which counts as a failed attempt, because it cannot be "
                f"examined: {error_line(further)}. Its text: {text}"
            ).with_traceback(traceback_of(error))
        show_as(error, text)
        return error

    def retry_delay_seconds(self, error: BaseException, attempt: int) -> float:
        """Return the wait in seconds after the attempt with this number (from 1), which has raised `error`."""
        if isinstance(error, RetryLater):
            return self.retry.level_seconds(error.level)
        return self.retry.delay_seconds(attempt)


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def threads_of(subscriptions: Sequence[Subscription], most: int) -> int:
    """Return how many handler threads a process with these subscriptions has at most, if it shall have `most`.

    A subscription with more threads than the default raises the number, because its author has asked for them.
    """
    wanted = [one.threads for one in subscriptions]
    return min(sum(wanted), max([most, *(threads for threads in wanted if threads > DEFAULT_THREADS)]))
