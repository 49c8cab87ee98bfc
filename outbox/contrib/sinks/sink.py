"""What a sink is: it takes messages that go elsewhere, and says of each whether it was acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from outbox.errors import HandlerError, ServiceUnavailable


class Rejected(HandlerError):
    """The endpoint refuses this message; the same message will be refused again."""


class EarlierNotAcknowledged(HandlerError):
    """An earlier message of the same key was not acknowledged, so this one was not sent."""


class NotAcknowledged(HandlerError):
    """The endpoint did not acknowledge the message; it may have it all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """One message as it leaves: `body` and `headers` are what the chosen format makes of it.

    `message_id` is the same however often it is sent: receivers know repetitions by it. `topic` is the name it has
    there. `headers` are those of the format; the sink adds what its transport needs.
    """

    message_id: UUID
    topic: str
    key: str
    content_type: str
    body: bytes
    headers: Mapping[str, str]


class Sink(Protocol):
    """Sends messages to one endpoint. Its methods are called by several threads at a time.

    `binding` says how CloudEvents name their attributes there (`http`, `amqp`, `kafka`). `batch` and `threads` are
    what suits it unless a declaration says otherwise.
    """

    @property
    def binding(self) -> str:
        """`http`, `amqp` or `kafka`."""

    @property
    def batch(self) -> int:
        """Messages per call."""

    @property
    def threads(self) -> int:
        """Calls at a time."""

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send messages, no two of them with one key; None for each that was acknowledged, else why it was not.

        Rejected for one that will never be taken. Raises ServiceUnavailable when the endpoint takes nothing now:
        then none of these counts as sent.
        """

    def close(self) -> None:
        """Let go of connections."""


def one_by_one(
    messages: Sequence[Outgoing], send: Callable[[Outgoing], Exception | None]
) -> Sequence[Exception | None]:
    """Send each by itself. ServiceUnavailable comes out of the first; of a later one it is what the rest gets."""
    results: list[Exception | None] = []
    for message in messages:
        try:
            results.append(send(message))
        except ServiceUnavailable as error:
            if not results:
                raise
            return [*results, *([error] * (len(messages) - len(results)))]
    return results
