"""The documents for other teams: a JSON Schema per event, and one AsyncAPI 3 document of the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox.events.declaration import EVENT_HEADER, VERSION_HEADER, EventType, schema_id
from outbox.subscription import Subscription

Schema = dict[str, Any]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
# The name of the message of a topic without a declared event.
_UNTYPED: Final = "untyped"


@dataclass(frozen=True, slots=True)
class Service:
    """What the document says about the service. `topics` are the names of its declared topics."""

    title: str
    version: str
    topics: Sequence[str]


def json_schema(one: EventType) -> Schema:
    """Return the JSON Schema of the bodies of an event, as a document of its own."""
    title = f"{one.name} version {one.version}"
    return {"$schema": _DIALECT, "$id": schema_id(one.name, one.version), "title": title, **one.shape.written}


def asyncapi(service: Service, declared: Iterable[EventType], subscriptions: Iterable[Subscription]) -> Schema:
    """Return the AsyncAPI 3 document of a service: its topics, events, publishers and consumers, with examples."""
    declared, subscriptions = list(declared), list(subscriptions)
    schemas: dict[str, Schema] = {}
    messages = {_message_name(one): _message(one, schemas) for one in declared}
    by_topic: dict[str, list[EventType]] = {}
    for one in declared:
        by_topic.setdefault(one.topic, []).append(one)
    topics = {*by_topic, *(one.topic for one in subscriptions), *service.topics}
    if topics - set(by_topic):
        messages[_UNTYPED] = {"name": _UNTYPED, "title": "A message without a declared type", "payload": {}}
    channels = {topic: _channel(topic, by_topic.get(topic, ())) for topic in sorted(topics)}
    operations: dict[str, Any] = {}
    for topic, events in sorted(by_topic.items()):
        if sent := [one for one in events if not one.publisher]:
            operations[f"send.{topic}"] = _operation("send", topic, sent, f"This service publishes to {topic}.")
    for reads in sorted(subscriptions, key=lambda item: (item.group, item.topic)):
        operations[f"receive.{reads.group}.{reads.topic}"] = {
            **_operation(
                "receive", reads.topic, by_topic.get(reads.topic, ()), f"The group {reads.group} reads {reads.topic}."
            ),
            "x-outbox-group": reads.group,
            **({"x-outbox-filter": reads.filter} if reads.filter else {}),
        }
    components: dict[str, Any] = {"messages": messages}
    if schemas:
        components["schemas"] = schemas
    return {
        "asyncapi": "3.0.0",
        "info": {"title": service.title, "version": service.version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": components,
    }


def _message_name(one: EventType) -> str:
    return f"{one.name}.v{one.version}"


def _channel(topic: str, events: Sequence[EventType]) -> Schema:
    names = [_message_name(one) for one in events] or [_UNTYPED]
    return {"address": topic, "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names}}


def _operation(action: str, topic: str, events: Sequence[EventType], summary: str) -> Schema:
    names = [_message_name(one) for one in events] or [_UNTYPED]
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": f"#/channels/{topic}"},
        "messages": [{"$ref": f"#/channels/{topic}/messages/{name}"} for name in names],
    }


def _message(one: EventType, schemas: dict[str, Schema]) -> Schema:
    prefix = f"{_message_name(one)}."
    definitions = one.shape.written.get("$defs", {})
    schemas.update({prefix + name: _as_draft_7(inner, prefix) for name, inner in definitions.items()})
    payload = {name: value for name, value in one.shape.written.items() if name != "$defs"}
    constants = {EVENT_HEADER: one.name, VERSION_HEADER: str(one.version)}
    message = {
        "name": _message_name(one),
        "title": f"{one.name} version {one.version}",
        "headers": {
            "type": "object",
            "properties": {name: {"type": "string", "const": value} for name, value in constants.items()},
            "required": sorted(constants),
        },
        "payload": _as_draft_7(payload, prefix),
        "examples": [{"headers": constants, "payload": example(one.shape.written)}],
    }
    if one.publisher:
        message["x-outbox-publisher"] = one.publisher
    return message


def _as_draft_7(schema: Any, prefix: str) -> Any:
    """Return a schema in the dialect of AsyncAPI, whose references lead to the components of the document."""
    if isinstance(schema, list):
        return [_as_draft_7(one, prefix) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for name, value in schema.items():
        if name == "$ref":
            made[name] = str(value).replace("#/$defs/", f"#/components/schemas/{prefix}")
        elif name == "prefixItems":
            made["items"], made["additionalItems"] = _as_draft_7(value, prefix), False
        elif name == "properties":
            made[name] = {inner: _as_draft_7(one, prefix) for inner, one in value.items()}
        elif name in ("enum", "const", "default", "examples", "required"):
            made[name] = value
        elif name != "items" or "prefixItems" not in schema:
            made[name] = _as_draft_7(value, prefix)
    return made


# -- examples --------------------------------------------------------------------------------------


_TEXTS: Final = {
    "decimal": "12.50",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "date-time": "2026-01-31T12:00:00+00:00",
    "date": "2026-01-31",
    "time": "12:00:00",
    "duration": "P0DT00H15M00S",
    "email": "name@example.com",
    "uri": "https://example.com/",
}
_PLAIN: Final[Mapping[str, Any]] = {"integer": 1, "number": 1.5, "boolean": True, "null": None, "string": "text"}
_DEEPEST: Final = 8


def example(schema: Mapping[str, Any]) -> Any:
    """Return a value of the schema, made from the types of its fields. It has no data of a real message."""
    return _example(schema, schema.get("$defs", {}), 0)


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        return _example(definitions[str(schema["$ref"]).removeprefix("#/$defs/")], definitions, depth + 1)
    for given in ("const", "default"):
        if given in schema:
            return schema[given]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            # Deep inside a type that contains itself, the last alternative is usually null.
            return _example(schema[keyword][0 if depth < _DEEPEST else -1], definitions, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        fields = schema.get("properties", {})
        wanted = fields if depth < _DEEPEST else schema.get("required", ())
        return {name: _example(fields[name], definitions, depth + 1) for name in wanted}
    if kind == "array":
        if "prefixItems" in schema:
            return [_example(one, definitions, depth + 1) for one in schema["prefixItems"]]
        items = schema.get("items")
        return [_example(items, definitions, depth + 1)] if isinstance(items, Mapping) and depth < _DEEPEST else []
    if kind == "string":
        return _text_example(schema)
    if kind in ("integer", "number"):
        return _number_example(schema, kind)
    return _PLAIN.get(str(kind))


def _text_example(schema: Mapping[str, Any]) -> str:
    text = "dGV4dA==" if "contentEncoding" in schema else _TEXTS.get(str(schema.get("format")), "text")
    return text.ljust(int(schema.get("minLength", 0)), "x")[: int(schema.get("maxLength", len(text) + 1000))]


def _number_example(schema: Mapping[str, Any], kind: str) -> Any:
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    if lowest is not None:
        return lowest + 1 if kind == "integer" or "exclusiveMinimum" in schema else lowest
    highest = schema.get("maximum", schema.get("exclusiveMaximum"))
    return _PLAIN[kind] if highest is None else highest - 1
