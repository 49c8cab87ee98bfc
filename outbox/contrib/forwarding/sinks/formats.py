"""The formats of forwarded messages: plain, or a CloudEvent 1.0 in structured or binary mode."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final
from urllib.parse import quote

from outbox.contrib.forwarding.sinks.forwarder import Format
from outbox.contrib.forwarding.sinks.sink import Outgoing
from outbox.errors import ConfigurationError
from outbox.events.declaration import EVENT_HEADER, VERSION_HEADER, schema_id
from outbox.message import Delivery

PLAIN: Final = "plain"
STRUCTURED: Final = "cloudevents-structured"
BINARY: Final = "cloudevents-binary"
NAMES: Final = (PLAIN, STRUCTURED, BINARY)

# Attributes of CloudEvents that a header of the message must not overwrite.
_RESERVED: Final = frozenset(
    ("id", "source", "specversion", "type", "datacontenttype", "dataschema", "subject", "time", "data")
)
_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_JSON: Final = re.compile(r"application/(json|.+\+json)\s*(;.*)?")


def format_named(name: str, *, binding: str, source: str = "") -> Format:
    """Return the format with this name for a sink with this binding. Raises ConfigurationError.

    `source` is the CloudEvents attribute `source`: a URI reference that identifies the publisher.
    """
    if name not in NAMES:
        raise ConfigurationError(f"format={name!r} does not exist: use one of {', '.join(NAMES)}.")
    if name == PLAIN:
        return functools.partial(plain, encode=_percent_encoded if binding == "http" else str)
    if not source:
        raise ConfigurationError(
            f"format={name!r} needs a source that identifies the publisher, like source='/shops/orders'."
        )
    return _cloud_events(name, binding, source)


def plain(delivery: Delivery, topic: str, *, encode: Callable[[str], str] = str) -> Outgoing:
    """Keep the body unchanged. Put the message's other fields into headers whose names begin with `outbox-`."""
    message = delivery.message
    headers = {
        "outbox-message-id": str(message.message_id),
        "outbox-topic": topic,
        "outbox-published-at": message.born_at.isoformat(),
        **({"outbox-key": message.key} if message.key else {}),
        **({"outbox-tag": message.tag} if message.tag else {}),
        **{f"outbox-header-{name}": value for name, value in message.headers.items()},
    }
    encoded = {name: encode(value) for name, value in headers.items()}
    return _outgoing(delivery, topic, message.content_type, message.body, encoded)


def _percent_encoded(value: str) -> str:
    """Percent-encode `"`, `%` and all characters outside of printable ASCII, as CloudEvents' HTTP binding does."""
    return quote(value, safe=_SAFE)


def _cloud_events(name: str, binding: str, source: str) -> Format:
    try:
        from cloudevents.core.formats.json import JSONFormat
    except ImportError as error:
        raise ConfigurationError(f"format={name!r} needs the package cloudevents: install its extra.") from error
    module, json_format = _binding(binding), JSONFormat()
    write = module.to_binary if name == BINARY else module.to_structured

    def form(delivery: Delivery, topic: str) -> Outgoing:
        written = write(_event(delivery, topic, source, binary=name == BINARY), json_format)
        headers, body = _parts(binding, written)
        content_type = headers.pop("content-type", "") or delivery.message.content_type
        return _outgoing(delivery, topic, content_type, body, headers)

    return form


def _binding(name: str) -> ModuleType:
    from cloudevents.core.bindings import http, kafka, rabbitmq

    return {"amqp": rabbitmq, "http": http, "kafka": kafka}[name]


def _event(delivery: Delivery, topic: str, source: str, *, binary: bool) -> Any:
    """Make the CloudEvent of a delivery. If a delivery is sent again, id and source of the CloudEvent are the same."""
    from cloudevents.core.v1.event import CloudEvent

    message = delivery.message
    attributes: dict[str, Any] = {
        **_extensions(message.headers),
        "id": str(message.message_id),
        "source": source,
        "type": topic,
        "specversion": "1.0",
        "time": message.born_at,
        "datacontenttype": message.content_type,
    }
    if EVENT_HEADER in message.headers:
        name, version = message.headers[EVENT_HEADER], message.headers.get(VERSION_HEADER, "1")
        attributes["dataschema"] = schema_id(name, version)
    if message.key:
        attributes |= {"subject": message.key, "partitionkey": message.key}
    if message.tag:
        attributes["tag"] = message.tag
    data: Any = message.body
    if not binary and _JSON.fullmatch(message.content_type):
        data = json.loads(message.body)
    return CloudEvent(attributes, data)


def _extensions(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers as extension attributes of a CloudEvent.

    The names of these attributes have at most twenty characters: lower-case letters and digits.
    """
    named = {re.sub("[^a-z0-9]", "", name.lower())[:20]: value for name, value in headers.items()}
    return {name: value for name, value in named.items() if name and name not in _RESERVED}


def _parts(binding: str, written: Any) -> tuple[dict[str, str], bytes]:
    if binding == "kafka":
        return {name.lower(): value.decode() for name, value in written.headers.items()}, written.value
    headers = {name.lower(): value for name, value in written.headers.items()}
    if binding == "amqp" and written.content_type:
        headers["content-type"] = written.content_type
    return headers, written.body


def _outgoing(delivery: Delivery, topic: str, content_type: str, body: bytes, headers: Mapping[str, str]) -> Outgoing:
    message = delivery.message
    return Outgoing(
        message_id=message.message_id,
        topic=topic,
        key=message.key,
        content_type=content_type,
        body=body,
        headers=headers,
    )
