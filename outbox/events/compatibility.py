"""Compares two JSON Schemas: whether a reader of one schema can read every value that a writer of the other writes.

The rules are those of Confluent's schema registry for JSON Schema, for the parts of JSON Schema that event types use.
What this module does not know, it refuses: a difference that is refused by mistake costs a version, and a difference
that is allowed by mistake costs dead letters.

A random test (tests/core/test_event_changes.py) runs writers and readers of changed types against these rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Schema = Mapping[str, Any]

# Keywords that do not restrict which values are valid.
_TEXTS: Final = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "discriminator", "$defs"}
)
_COMPARED: Final = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "anyOf",
        "oneOf",
        "enum",
        "const",
    }
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why a reader cannot read what a writer writes.

    `field` is the path of the field inside the event. `remedy` says what to change.
    """

    field: str
    reason: str
    remedy: str


def differences(reader: Schema, writer: Schema) -> list[Difference]:
    """Return why a reader of the schema `reader` cannot read every value of `writer`; an empty list if it can."""
    return list(_Comparison(reader, writer).of(reader, writer, "", frozenset()))


class _Comparison:
    """Compares parts of two schemas, whose references lead to their own definitions."""

    def __init__(self, reader: Schema, writer: Schema) -> None:
        self._reader = reader.get("$defs", {})
        self._writer = writer.get("$defs", {})

    def of(self, reader: Schema, writer: Schema, path: str, seen: frozenset[tuple[str, str]]) -> Iterator[Difference]:
        """Yield the differences of two parts. `seen`: the pairs of definitions that are compared already."""
        names = (str(reader.get("$ref", "")), str(writer.get("$ref", "")))
        if any(names):
            if names in seen:
                return
            if all(names):
                seen |= {names}
            reader, writer = _resolved(reader, self._reader), _resolved(writer, self._writer)
            yield from self.of(reader, writer, path, seen)
            return
        written = _alternatives(writer)
        if len(written) > 1:
            for one in written:
                yield from self.of(reader, one, path, seen)
            return
        read = _alternatives(reader)
        if len(read) > 1:
            found = [list(self.of(one, writer, path, seen)) for one in read]
            if all(found):
                yield min(found, key=len)[0] if len(found) == 1 else _types_differ(path, reader, writer)
            return
        yield from self._plain(read[0], written[0], path, seen)

    def _plain(
        self, reader: Schema, writer: Schema, path: str, seen: frozenset[tuple[str, str]]
    ) -> Iterator[Difference]:
        if "$ref" in reader or "$ref" in writer:
            yield from self.of(reader, writer, path, seen)
            return
        if not set(reader) - _TEXTS:
            return
        kind, written = reader.get("type"), writer.get("type")
        if kind is not None and kind != written and (kind, written) != ("number", "integer"):
            yield _types_differ(path, reader, writer)
            return
        values, given = _values(reader), _values(writer)
        if values is not None and (given is None or any(value not in values for value in given)):
            new = "any value" if given is None else ", ".join(repr(one) for one in given if one not in values)
            yield Difference(
                path,
                f"readers know the values {', '.join(map(repr, values))}, and writers also write {new}",
                "let all code know the new values before any code writes them, or raise the version",
            )
        for keyword in sorted((set(reader) | set(writer)) - _TEXTS - _COMPARED):
            if keyword in reader and reader[keyword] != writer.get(keyword):
                yield Difference(
                    path,
                    f"readers demand {keyword}={reader[keyword]!r}, and writers have {writer.get(keyword)!r}",
                    f"keep {keyword}, or raise the version",
                )
        if kind == "object":
            yield from self._objects(reader, writer, path, seen)
        elif kind == "array":
            yield from self._arrays(reader, writer, path, seen)

    def _objects(
        self, reader: Schema, writer: Schema, path: str, seen: frozenset[tuple[str, str]]
    ) -> Iterator[Difference]:
        read, written = reader.get("properties", {}), writer.get("properties", {})
        always = set(writer.get("required", ()))
        for name in sorted(reader.get("required", ())):
            inside = f"{path}.{name}" if path else name
            if name not in written:
                yield Difference(
                    inside,
                    "readers require the field, and writers do not write it",
                    "give the field a default, or raise the version",
                )
            elif name not in always:
                yield Difference(
                    inside,
                    "readers require the field, and writers may leave it out",
                    "give the field a default in all code first, or raise the version",
                )
        for name in sorted(set(read) & set(written)):
            yield from self.of(read[name], written[name], f"{path}.{name}" if path else name, seen)
        rest, others = reader.get("additionalProperties", True), writer.get("additionalProperties", True)
        if rest is False:
            for name in sorted(set(written) - set(read)):
                yield Difference(
                    f"{path}.{name}" if path else name,
                    "readers forbid unknown fields, and writers write this field",
                    "let readers ignore unknown fields (extra='ignore'), or raise the version",
                )
            if others is not False and not written:
                yield _types_differ(path, reader, writer)
        elif isinstance(rest, Mapping):
            if not isinstance(others, Mapping):
                yield _types_differ(path, reader, writer)
                return
            yield from self.of(rest, others, f"{path}.*" if path else "*", seen)
            for name in sorted(set(written) - set(read)):
                yield from self.of(rest, written[name], f"{path}.{name}" if path else name, seen)
        elif isinstance(others, Mapping) and read:
            # A map may have any key, so it may also have the reader's fields with values of another type.
            yield _types_differ(path, reader, writer)

    def _arrays(
        self, reader: Schema, writer: Schema, path: str, seen: frozenset[tuple[str, str]]
    ) -> Iterator[Difference]:
        first, given = reader.get("prefixItems"), writer.get("prefixItems")
        if first is not None or given is not None:
            if first is None or given is None or len(first) != len(given):
                yield _types_differ(path, reader, writer)
                return
            for place, (one, other) in enumerate(zip(first, given, strict=True)):
                yield from self.of(one, other, f"{path}[{place}]", seen)
        items, others = reader.get("items"), writer.get("items")
        if isinstance(items, Mapping):
            yield from self.of(items, others if isinstance(others, Mapping) else {}, f"{path}[]", seen)
        elif items is False and others is not False:
            yield _types_differ(path, reader, writer)


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    while "$ref" in schema:
        found = definitions.get(str(schema["$ref"]).removeprefix("#/$defs/"))
        if found is None:
            return {"not": {}, "type": str(schema["$ref"])}
        schema = found
    return schema


def _alternatives(schema: Schema) -> list[Schema]:
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            rest = {name: value for name, value in schema.items() if name not in (keyword, *_TEXTS)}
            return [inner for one in schema[keyword] for inner in _alternatives({**one, **rest})]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": one} for one in schema["type"]]
    return [schema]


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def _types_differ(path: str, reader: Schema, writer: Schema) -> Difference:
    return Difference(
        path,
        f"readers expect {_shown(reader)}, and writers write {_shown(writer)}",
        "add a new field instead of changing this one, or raise the version and declare @upcast",
    )


def _shown(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix("#/$defs/")
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return " or ".join(_shown(one) for one in schema[keyword])
    kind = schema.get("type", "any value")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{text} ({schema['format']})" if "format" in schema else text
