"""The protocol of every source. A source delivers foreign messages in order, and deletes acknowledged messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outbox.codec import REFERENCE_CONTENT_TYPE
from outbox.errors import InvalidMessage
from outbox.events.declaration import headers_of_schema
from outbox.message import Message

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "outbox:receive")
_HEADER: Final = "outbox-header-"
_STRUCTURED: Final = "application/cloudevents+json"
# The prefixes of CloudEvents attributes in the headers of Kafka (`ce_`) and of AMQP.
_PREFIXES: Final = ("ce_", "cloudevents:", "cloudevents_")
_SHOWN_CHARACTERS: Final = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A message as received.

    `message_id` is the id that the sender gave the message, or ''. `where` is the place of the message at the source.

    `sender` is the application that chose the id, or '' if the transport does not name it. `problem` says why the
    source could not read the message, which is then poison. Only the source uses `handle`.
    """

    message_id: str
    body: bytes
    where: str
    content_type: str = ""
    key: str = ""
    sender: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    handle: Any = None


class Source(Protocol):
    """Receives from one queue or topic. Only one thread calls the methods of a source."""

    def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Incoming]:
        """Return up to `limit` messages, oldest first.

        Return no message if no message came in time. Raises ServiceUnavailable.
        """

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge stored messages.

        If this call raises ServiceUnavailable, the source delivers the messages again.
        """

    def close(self) -> None:
        """Close the connections. The next connection gets the unacknowledged messages again."""


Convert = Callable[[Incoming, str, str], Message]


def identity(incoming: Incoming) -> tuple[str, str]:
    """Return a message's sender, and the id that the sender gave the message. An unknown sender or id is ''.

    A CloudEvent is identified by its source and its id, on any transport.
    """
    event = _event(incoming)
    if event.get("id") and event.get("source"):
        return event["source"], event["id"]
    return incoming.sender, incoming.message_id or event.get("id", "")


def message_id_of(name: str, incoming: Incoming) -> uuid.UUID:
    """Return the id under which a message is stored.

    All repetitions of a message have the same id. Raises InvalidMessage.

    The id is computed from the sender and from the id that the sender gave the message, even if the sender's message id
    is a UUID. If a message of this broker is forwarded and then received again, the received message is a new message
    and needs a new id. Each sender has a UUID namespace of its own, so if two senders use the same message id, the
    results differ.
    """
    sender, message_id = identity(incoming)
    if not message_id:
        raise InvalidMessage(
            f"{incoming.where} has no message id, so repetitions could not be recognised: let the sender set an id, "
            "or set an id with convert=."
        )
    scope = uuid.uuid5(_NAMESPACE, name)
    return uuid.uuid5(uuid.uuid5(scope, sender) if sender else scope, message_id)


def convert(incoming: Incoming, name: str, topic: str) -> Message:
    """Return the message to store in `topic`.

    The body is unchanged. Key, tag and headers are those that the sender has set.

    The function reads messages that a sink sent as `plain`, and CloudEvents in binary mode. Raises InvalidMessage or
    InvalidName.
    """
    if incoming.content_type == REFERENCE_CONTENT_TYPE:
        raise InvalidMessage(
            f"{incoming.where} has the content type {REFERENCE_CONTENT_TYPE}: it is a reference to a large body of the "
            "sender, which this broker cannot read. FORWARD of outbox sends the body itself: let the sender use it."
        )
    given = {_attribute(header): value for header, value in incoming.headers.items()}
    own = {name[len(_HEADER) :]: value for name, value in incoming.headers.items() if name.lower().startswith(_HEADER)}
    sender, message_id = identity(incoming)
    own = headers_of_schema(given.get("ce-dataschema", "")) | own
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


def text_of(value: object) -> str:
    """Return a value of a transport's header as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _attribute(header: str) -> str:
    """Return a header's name in the form of HTTP and RabbitMQ (`ce-`). Kafka and AMQP write other prefixes."""
    lower = header.lower()
    prefix = next((prefix for prefix in _PREFIXES if lower.startswith(prefix)), "")
    return f"ce-{lower[len(prefix) :]}" if prefix else lower
