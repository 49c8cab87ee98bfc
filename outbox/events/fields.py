"""The fields of an event as rows of a table: path, type, and whether a body must have the field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Schema = Mapping[str, Any]

_MOST_VALUES: Final = 8


@dataclass(frozen=True, slots=True)
class EventField:
    """One field. `path` is `lines[].sku` for a field of the items of a list, and `prices.*` for the values of a map.

    `type` is the type in the words of JSON Schema.
    """

    path: str
    type: str
    required: bool


def fields_of(schema: Schema) -> list[EventField]:
    """Return the fields of the bodies of a schema, each followed by the fields inside it.

    The fields of a type that contains itself are listed once.
    """
    return list(_Fields(schema.get("$defs", {})).inside(schema, "", frozenset()))


class _Fields:
    """Lists the fields of parts of one schema, whose references lead to `definitions`."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions

    def inside(self, schema: Schema, path: str, seen: frozenset[str]) -> Iterator[EventField]:
        """Yield the fields of a part. `seen`: the definitions around this part."""
        if "$ref" in schema:
            name = _name(schema)
            if name not in seen:
                yield from self.inside(self._definitions.get(name, {}), path, seen | {name})
            return
        for keyword in ("anyOf", "oneOf"):
            for one in schema.get(keyword, ()):
                yield from self.inside(one, path, seen)
        required = schema.get("required", ())
        for name, one in schema.get("properties", {}).items():
            at = f"{path}.{name}" if path else name
            yield EventField(at, type_text(one), name in required)
            yield from self.inside(one, at, seen)
        for one in (schema.get("items"), *schema.get("prefixItems", ())):
            if isinstance(one, Mapping):
                yield from self.inside(one, f"{path}[]", seen)
        if isinstance(schema.get("additionalProperties"), Mapping):
            yield from self.inside(schema["additionalProperties"], f"{path}.*" if path else "*", seen)


def type_text(schema: Schema) -> str:
    """Return the type of a part of a schema as a short text."""
    if "$ref" in schema:
        return _name(schema)
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            return " or ".join(dict.fromkeys(type_text(one) for one in schema[keyword]))
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if "enum" in schema:
        values = [json.dumps(one, ensure_ascii=False) for one in schema["enum"]]
        return " or ".join(values[:_MOST_VALUES]) + (" or …" if len(values) > _MOST_VALUES else "")
    kind = schema.get("type", "any value")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if "prefixItems" in schema:
        return f"array of {', '.join(type_text(one) for one in schema['prefixItems'])}"
    if isinstance(schema.get("items"), Mapping):
        return f"array of {type_text(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), Mapping):
        return f"map of {type_text(schema['additionalProperties'])}"
    detail = schema.get("format") or schema.get("contentEncoding")
    return f"{text} ({detail})" if detail else text


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")
