"""Reads the events that a project declares with `@event` and `@upcast`: topics, versions, types of fields, conversions.

The modules are imported by the process that starts Spark. Executors get the functions themselves, so they need neither
outbox nor the project, unless a function uses them.

`spark` imports `outbox.events` only if the rules name modules.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .rule import EventRule, FieldType

_OBJECT: Final = "object"
# The types of text by `format` of JSON Schema. Any other text is compared unchanged.
_FORMATS: Final[Mapping[str, FieldType]] = {
    "decimal": FieldType.DECIMAL,
    "uuid": FieldType.UUID,
    "date-time": FieldType.TIMESTAMP,
    "date": FieldType.DATE,
}
_TYPES: Final[Mapping[str, FieldType]] = {
    "integer": FieldType.INTEGER,
    "number": FieldType.DECIMAL,
    "boolean": FieldType.BOOLEAN,
    "string": FieldType.TEXT,
}
_EVENT: Final = "outbox-event"


class EventsUnusable(Exception):
    """The events of the rules file cannot be used. `remedy` says what to change."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


class DeclaredEvents:
    """The events of Python modules. Raises EventsUnusable if a module cannot be imported, or declares no event."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._declaration = _declaration_of(modules)
        self._modules = tuple(modules)
        self._newest: dict[str, Any] = {one.name: one for one in self._declaration.events()}
        if not self._newest:
            raise EventsUnusable(f"{', '.join(modules)}: no @event is declared", "name the modules with your @event")

    def rule(self, name: str) -> EventRule:
        """Return the highest version of an event, with the functions that lead to it. Raises EventsUnusable."""
        newest = self._found(name)
        _pickle_by_value(self._modules)
        declared = self._declaration.events()
        starts = {one.at for one in declared} | {
            (known, number) for known in self._newest for number in self._declaration.versions_of(known)
        }
        chains = {start: self._declaration.upcasts_to(start, newest.at) for start in sorted(starts)}
        return EventRule(
            name=name,
            version=newest.version,
            upcasts={start: chain for start, chain in chains.items() if chain is not None},
        )

    def topic(self, name: str) -> str:
        """Return the topic of an event. Raises EventsUnusable."""
        return str(self._found(name).topic)

    def shares_its_topic(self, name: str) -> bool:
        """Whether another event has the same topic."""
        topic = self.topic(name)
        return any(one.topic == topic for other, one in self._newest.items() if other != name)

    def types(self, name: str) -> dict[str, FieldType]:
        """Return the type of each field of an event that can be compared, by its path. Raises EventsUnusable."""
        schema = self._found(name).shape.written
        return dict(_types(schema, schema.get("$defs", {}), "", frozenset()))

    def _found(self, name: str) -> Any:
        if name not in self._newest:
            known = ", ".join(sorted(self._newest))
            raise EventsUnusable(f"the modules in events declare no event {name!r}", f"use one of: {known}")
        return self._newest[name]


def condition_of(events: Iterable[str]) -> str:
    """Return an SQL condition for the messages of these events, and for those without the header of an event.

    PostgreSQL and Spark read it alike. The view has the headers as the text of jsonb, in which a quotation mark inside
    a value is escaped, so the searched text occurs only as a header.
    """
    searched = [f"{json.dumps(_EVENT)}: {json.dumps(name, ensure_ascii=False)}" for name in sorted(events)]
    found = [f"position({_quoted(one)} IN headers) > 0" for one in searched]
    none = f"position({_quoted(json.dumps(_EVENT) + ':')} IN headers) = 0"
    return f"(headers IS NULL OR {none} OR {' OR '.join(found)})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _declaration_of(modules: Iterable[str]) -> Any:
    """Import the modules, and return the module of outbox that knows what they declare. Raises EventsUnusable."""
    # A console script does not have the current folder on its path, and a project's modules are found there.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise EventsUnusable(
                f"the module {module!r} cannot be imported: {type(error).__name__}: {error}",
                "run the command in the folder of the project, and keep events apart from models: the module may "
                "import only what this environment has",
            ) from error
    from outbox.events import declaration

    return declaration


def _pickle_by_value(modules: Iterable[str]) -> None:
    """Let Spark send the functions of these modules with their code. Otherwise, each executor would import them."""
    from pyspark import cloudpickle

    # The package has types, but this part of it has none.
    pickling: Any = cloudpickle
    for module in modules:
        pickling.register_pickle_by_value(sys.modules[module])


def _types(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str, seen: frozenset[str]
) -> Iterator[tuple[str, FieldType]]:
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        if name not in seen:
            yield from _types(definitions.get(name, {}), definitions, path, seen | {name})
        return
    choices = [one for keyword in ("anyOf", "oneOf") for one in schema.get(keyword, ()) if one.get("type") != "null"]
    if choices:
        found = [dict(_types(one, definitions, path, seen)) for one in choices]
        # A field with several types has no common form.
        yield from ((at, kind) for at, kind in found[0].items() if all(one.get(at) is kind for one in found))
        return
    if schema.get("type") == _OBJECT:
        for name, one in schema.get("properties", {}).items():
            # A path in the rules file separates its names by dots.
            if "." not in name:
                yield from _types(one, definitions, f"{path}.{name}" if path else name, seen)
    elif path and (kind := _type_of(schema)) is not None:
        yield path, kind


def _type_of(schema: Mapping[str, Any]) -> FieldType | None:
    kind = schema.get("type")
    if kind is None and ("enum" in schema or "const" in schema):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return FieldType.TEXT if all(isinstance(value, str) for value in values) else None
    if kind == "string":
        return _FORMATS.get(str(schema.get("format")), FieldType.TEXT)
    return _TYPES.get(str(kind))
