"""Converts messages to RocketMQ's form, and messages of RocketMQ to `Message`.

The property `outbox` has, as ASCII JSON, all data for which RocketMQ has no field. All these data are in one property,
because values of RocketMQ's properties must not be empty or contain separators. The tag of the message becomes the tag
in RocketMQ. The message id and the key become RocketMQ's keys, by which its tools find messages.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from outbox import names
from outbox.errors import InvalidMessage
from outbox.message import Message
from outbox.rocketmq.declarations import in_namespace, wire_name
from outbox.transaction import HalfTransaction

PROPERTY: Final = "outbox"
# The default limits of the proxy and the broker (maxMessageSize; maxUserPropertySize).
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_PROPERTY_BYTES: Final = 15 * 1024
_FOREIGN: Final = uuid.UUID("5b0d3a52-2f4e-5c0e-9a55-6a1b9d1f0c11")


def to_wire(message: Message, *, fifo: bool, half: HalfTransaction | None = None, namespace: str = "") -> Any:
    """Convert a message for sending. Raises InvalidMessage if RocketMQ does not allow the message."""
    # Only sending needs the client library. So the modules `left` and `exhausted` can convert messages without the
    # library.
    from outbox.rocketmq.client import WireMessage

    if not message.body:
        raise InvalidMessage(
            f"message {message.message_id} for topic {message.topic!r}: RocketMQ allows no empty body."
        )
    topic = in_namespace(namespace, wire_name(message.topic))
    noted = _noted(message, topic, half, namespace)
    _check_size(message, noted)
    wire = WireMessage()
    wire.topic = topic
    wire.body = message.body
    if message.tag:
        wire.tag = message.tag
    wire.keys = str(message.message_id)
    if message.key.strip() and not any(map(str.isspace, message.key)):
        wire.keys = message.key
    wire.add_property(PROPERTY, noted)
    if fifo:
        wire.message_group = message.key
    due = message.deliver_at
    if message.delay is not None:
        # The delivery time is computed with this machine's clock, because the server does not report its own time.
        due = datetime.now(UTC) + message.delay
    if due is not None:
        wire.delivery_timestamp = math.ceil(due.timestamp())
    return wire


def _noted(message: Message, topic: str, half: HalfTransaction | None, namespace: str) -> str:
    noted: dict[str, Any] = {
        "id": str(message.message_id),
        "content_type": message.content_type,
        "born_at": message.born_at.isoformat(),
    }
    if topic != message.topic:
        noted["topic"] = message.topic
    if namespace:
        noted["namespace"] = namespace
    if message.key:
        noted["key"] = message.key
    if message.headers:
        noted["headers"] = dict(message.headers)
    if half is not None:
        noted["transaction"] = str(half.transaction_id)
        noted["group"] = half.producer_group
        if half.ledger_id is not None:
            noted["ledger"] = str(half.ledger_id)
        if half.immunity_seconds is not None:
            noted["immunity"] = half.immunity_seconds
    return json.dumps(noted, separators=(",", ":"))


def _check_size(message: Message, noted: str) -> None:
    what = f"message {message.message_id} for topic {message.topic!r}"
    if len(noted) > MAX_PROPERTY_BYTES:
        raise InvalidMessage(
            f"{what}: its headers and key need {len(noted):,} bytes, but RocketMQ allows about 15,000. Shorten them."
        )
    if len(message.body) + len(noted) > MAX_BYTES:
        names.check_body_size(message.topic, message.body + noted.encode())


@dataclass(frozen=True, slots=True)
class CheckProperties:
    """The data about a transaction. RocketMQ sends the half message with each check, and the half message contains
    these data."""

    transaction_id: UUID
    producer_group: str
    namespace: str
    ledger_id: UUID | None
    immunity_seconds: int | None
    message: Message
    born_at: datetime
    checks: int


def asked(wire: Any) -> CheckProperties | None:
    """Return the data in the half message of a check, or None if outbox did not send the message."""
    noted = _notes(wire)
    if "transaction" not in noted:
        return None
    message = from_wire(wire)
    return CheckProperties(
        transaction_id=UUID(noted["transaction"]),
        producer_group=noted["group"],
        namespace=noted.get("namespace", ""),
        ledger_id=UUID(noted["ledger"]) if "ledger" in noted else None,
        immunity_seconds=noted.get("immunity"),
        message=message,
        born_at=message.born_at,
        checks=int(wire.properties.get("TRANSACTION_CHECK_TIMES", 1)),
    )


def from_wire(wire: Any) -> Message:
    """Convert a message that RocketMQ has delivered.

    A message of another program gets an id derived from RocketMQ's id. This id is the same at every delivery.
    """
    noted = _notes(wire)
    headers = noted.get("headers")
    if headers is None and not noted:
        headers = {name: value for name, value in wire.properties.items() if not name.startswith("__")}
    due = wire.delivery_timestamp
    return Message(
        topic=noted.get("topic", wire.topic),
        body=wire.body,
        message_id=UUID(noted["id"]) if noted else foreign_id(wire),
        key=noted.get("key", "") if noted else (wire.message_group or ""),
        tag=wire.tag or "",
        headers=MappingProxyType(headers or {}),
        content_type=noted.get("content_type", "application/json"),
        deliver_at=datetime.fromtimestamp(due / 1000, UTC) if due else None,
        born_at=_born(noted, wire),
    )


def foreign_id(wire: Any) -> UUID:
    """Return the id of a message that outbox did not send, or whose id cannot be read."""
    return uuid.uuid5(_FOREIGN, wire.message_id)


def _notes(wire: Any) -> Mapping[str, Any]:
    text = wire.properties.get(PROPERTY)
    found: Mapping[str, Any] = json.loads(text) if text else {}
    return found


def _born(noted: Mapping[str, Any], wire: Any) -> datetime:
    if "born_at" in noted:
        return datetime.fromisoformat(noted["born_at"])
    return datetime.fromtimestamp((wire.born_timestamp or 0) / 1000, UTC)
