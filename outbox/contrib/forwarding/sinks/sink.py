"""The protocol of every sink.

A sink sends messages to an endpoint, and reports for each message whether the endpoint acknowledged it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from outbox.errors import HandlerError, ServiceUnavailable


class Rejected(HandlerError):
    """The endpoint refuses this message, and will refuse it again."""


class EarlierNotAcknowledged(HandlerError):
    """An earlier message of the same key was not acknowledged, so this message was not sent."""

    may_concern_body = False


class NotAcknowledged(HandlerError):
    """The endpoint did not acknowledge the message, but may have received it."""

    may_concern_body = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """One message to send. `body` and `headers` are in the chosen format.

    If the message is sent again, `message_id` is the same, so that receivers can recognise the repetition. `topic` is
    the topic's name at the endpoint. The sink adds the headers that its transport needs.
    """

    message_id: UUID
    topic: str
    key: str
    content_type: str
    body: bytes
    headers: Mapping[str, str]


class Sink(Protocol):
    """Sends messages to one endpoint. Several threads may call the methods of a sink at the same time.

    `binding` chooses the form of CloudEvents attributes at the endpoint (`http`, `amqp`, `kafka`). `batch` and
    `threads` are the defaults of the sink, which the settings of a project can override.
    """

    @property
    def binding(self) -> str:
        """The name of the CloudEvents binding: `http`, `amqp` or `kafka`."""

    @property
    def batch(self) -> int:
        """The largest number of messages per call of `send`."""

    @property
    def threads(self) -> int:
        """The largest number of `send` calls at the same time."""

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send messages, at most one per key.

        Return None for each acknowledged message, and an error for each other message. Rejected says that the endpoint
        will never accept the message. If the endpoint is unavailable, raises ServiceUnavailable, and all messages of
        the call count as not sent.
        """

    def close(self) -> None:
        """Close the connections."""


def one_by_one(
    messages: Sequence[Outgoing], send: Callable[[Outgoing], Exception | None]
) -> Sequence[Exception | None]:
    """Send the messages one after the other.

    If the first message raises ServiceUnavailable, raise it. If a later message raises ServiceUnavailable, the error is
    the result of that message and of all messages after it.
    """
    results: list[Exception | None] = []
    for message in messages:
        try:
            results.append(send(message))
        except ServiceUnavailable as error:
            if not results:
                raise
            return [*results, *([error] * (len(messages) - len(results)))]
    return results
