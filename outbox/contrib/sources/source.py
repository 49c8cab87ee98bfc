"""What a source is: it hands over what others have sent, in order, and forgets it when it is told to."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outbox.errors import InvalidMessage
from outbox.message import Message

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "outbox:receive")
_HEADER: Final = "outbox-header-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A message as it was received. `message_id` is its sender's, '' without one; `where` says where it lay.

    `handle` is the source's own.
    """

    message_id: str
    body: bytes
    where: str
    content_type: str = ""
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    handle: Any = None


class Source(Protocol):
    """Receives from one place. One thread calls it."""

    def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Incoming]:
        """Up to `limit` messages, the oldest first; empty when none came in time. Raises ServiceUnavailable."""

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """These are stored and need not come again. Raises ServiceUnavailable: then they come again."""

    def close(self) -> None:
        """Let go; what was received and not acknowledged comes again."""


Convert = Callable[[Incoming, str, str], Message]


def message_id_of(name: str, incoming: Incoming) -> uuid.UUID:
    """The id under which it is stored: the same for every repetition, and no other's. Raises InvalidMessage.

    Derived, even from a UUID: a message of this very broker that comes back by a detour is another message.
    """
    if not incoming.message_id:
        raise InvalidMessage(
            f"{incoming.where} has no message id, so that repetitions could not be told: let its sender set one, or "
            f"give it one with convert=."
        )
    return uuid.uuid5(uuid.uuid5(_NAMESPACE, name), incoming.message_id)


def convert(incoming: Incoming, name: str, topic: str) -> Message:
    """The message as it is stored in `topic`: its body as it came; key, tag and headers where its sender said them.

    Understands what a sink sends as `plain` and what is a CloudEvent in binary mode. Raises InvalidMessage or
    InvalidName.
    """
    given = {header.lower(): value for header, value in incoming.headers.items()}
    own = {name[len(_HEADER) :]: value for name, value in incoming.headers.items() if name.lower().startswith(_HEADER)}
    return Message(
        topic=topic,
        body=incoming.body,
        message_id=message_id_of(name, incoming),
        key=incoming.key or given.get("outbox-key") or given.get("ce-partitionkey") or given.get("ce-subject") or "",
        tag=given.get("outbox-tag") or given.get("ce-tag") or "",
        headers={**own, "received-id": incoming.message_id[:255]},
        content_type=incoming.content_type or "application/octet-stream",
    )
