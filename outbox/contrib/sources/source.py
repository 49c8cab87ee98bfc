"""The protocol of every source. A source delivers foreign messages in order, and deletes acknowledged messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outbox.errors import InvalidMessage
from outbox.message import Message

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "outbox:receive")
_HEADER: Final = "outbox-header-"
_STRUCTURED: Final = "application/cloudevents+json"
# The prefixes of CloudEvents attributes in the headers of Kafka (`ce_`) and of AMQP.
_PREFIXES: Final = ("ce_", "cloudevents:", "cloudevents_")
_SHOWN_CHARACTERS: Final = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A message as received. `message_id` is the id that its sender gave it, or ''. `where` is its place at the source.

    `sender` is the application that chose the id, or '' if the transport does not name it. Only the source uses
    `handle`.
    """

    message_id: str
    body: bytes
    where: str
    content_type: str = ""
    key: str = ""
    sender: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    handle: Any = None


class Source(Protocol):
    """Receives from one queue or topic. Only one thread calls it."""

    def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Incoming]:
        """Return up to `limit` messages, oldest first; no message if none came in time. Raises ServiceUnavailable."""

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge stored messages. If it raises ServiceUnavailable, the source delivers these messages again."""

    def close(self) -> None:
        """Close the connections. Later, the source delivers the unacknowledged messages again."""


Convert = Callable[[Incoming, str, str], Message]


def identity(incoming: Incoming) -> tuple[str, str]:
    """Return a message's sender, and the id that the sender gave it. Each is '' if it is unknown.

    A CloudEvent is identified by its source and its id, on any transport.
    """
    event = _event(incoming)
    if event.get("id") and event.get("source"):
        return event["source"], event["id"]
    return incoming.sender, incoming.message_id or event.get("id", "")


def message_id_of(name: str, incoming: Incoming) -> uuid.UUID:
    """Return the id under which a message is stored. Every repetition has the same id. Raises InvalidMessage.

    The id is computed from the sender and the sender's id, even if that id is a UUID. If a message of this broker comes
    back through a source, it is another message and needs another id. Each sender has a separate namespace, so that the
    end of a sender's name is never read as the beginning of an id.
    """
    sender, message_id = identity(incoming)
    if not message_id:
        raise InvalidMessage(
            f"{incoming.where} has no message id, so repetitions could not be recognised: let its sender set one, or "
            "set one with convert=."
        )
    scope = uuid.uuid5(_NAMESPACE, name)
    return uuid.uuid5(uuid.uuid5(scope, sender) if sender else scope, message_id)


def convert(incoming: Incoming, name: str, topic: str) -> Message:
    """Return the message to store in `topic`. The body is unchanged. The sender has set key, tag and headers.

    The function reads messages that a sink sent as `plain`, and CloudEvents in binary mode. Raises InvalidMessage or
    InvalidName.
    """
    given = {_attribute(header): value for header, value in incoming.headers.items()}
    own = {name[len(_HEADER) :]: value for name, value in incoming.headers.items() if name.lower().startswith(_HEADER)}
    sender, message_id = identity(incoming)
    received = {"received-id": message_id, **({"received-source": sender} if sender else {})}
    return Message(
        topic=topic,
        body=incoming.body,
        message_id=message_id_of(name, incoming),
        key=incoming.key or given.get("outbox-key") or given.get("ce-partitionkey") or given.get("ce-subject") or "",
        tag=given.get("outbox-tag") or given.get("ce-tag") or "",
        headers={**own, **{header: value[:_SHOWN_CHARACTERS] for header, value in received.items()}},
        content_type=incoming.content_type or "application/octet-stream",
    )


def _event(incoming: Incoming) -> Mapping[str, str]:
    """Return the text attributes of a CloudEvent, from the headers (binary mode) or the body (structured mode)."""
    if not incoming.content_type.lower().startswith(_STRUCTURED):
        named = {_attribute(header): value for header, value in incoming.headers.items()}
        return {name[len("ce-") :]: value for name, value in named.items() if name.startswith("ce-")}
    try:
        body = json.loads(incoming.body)
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in body.items() if isinstance(value, str)} if isinstance(body, dict) else {}


def _attribute(header: str) -> str:
    """Return a header's name in the form of HTTP and RabbitMQ (`ce-`). Kafka and AMQP write other prefixes."""
    lower = header.lower()
    prefix = next((prefix for prefix in _PREFIXES if lower.startswith(prefix)), "")
    return f"ce-{lower[len(prefix) :]}" if prefix else lower
