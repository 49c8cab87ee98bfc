"""The shape of an event type: how a value of the type is written as JSON values, read from them, and described.

A dataclass needs no other package. A pydantic model is read and written by pydantic.

Reading is tolerant: unknown fields are ignored, and an absent field gets its default. Writing is strict: a value that
another process could not read is refused before it is published.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Literal
from uuid import UUID

from outbox.errors import ConfigurationError
from outbox.utils.safe_text import shown_text

Convert = Callable[[Any], Any]
Schema = dict[str, Any]


class ShapeError(ValueError):
    """A value does not have the declared shape. `path` leads to the value inside the event."""

    def __init__(self, text: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(f"{'.'.join(path)}: {text}" if path else text)
        self.text = text
        self.path = path

    def inside(self, name: str) -> ShapeError:
        """Return the error as seen from the value that contains this value as `name`."""
        return ShapeError(self.text, (name, *self.path))


@dataclass(frozen=True, slots=True)
class Shape:
    """How the values of a type are read and written. `read` and `write` raise ShapeError.

    `written` is the JSON Schema of the values that `write` returns, and `accepted` is the JSON Schema of the values
    that `read` takes. The two differ only for pydantic, for example for a Decimal.
    """

    read: Convert
    write: Convert
    written: Schema
    accepted: Schema


def is_shaped(kind: object) -> bool:
    """Whether the type is a dataclass or a pydantic model."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_json_schema"))


def shape_of(kind: type) -> Shape:
    """Return the shape of a dataclass or a pydantic model. Raises ConfigurationError."""
    if dataclasses.is_dataclass(kind):
        return _shape_of_dataclass(kind)
    if hasattr(kind, "model_validate") and hasattr(kind, "model_json_schema"):
        return _shape_of_model(kind)
    raise ConfigurationError(
        f"{kind.__qualname__} is not a type of events: write @event above a dataclass (@dataclass stands between "
        "@event and the class) or a pydantic.BaseModel."
    )


# -- pydantic --------------------------------------------------------------------------------------


def _shape_of_model(kind: Any) -> Shape:
    from pydantic.json_schema import GenerateJsonSchema

    class Schemas(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> Any:
            # pydantic describes a Decimal as any text, and then a text that is no number seems to fit.
            text = {"type": "string", "format": "decimal"}
            return text if self.mode == "serialization" else {"anyOf": [{"type": "number"}, text]}

    def read(value: Any) -> Any:
        try:
            return kind.model_validate(value)
        except ValueError as error:
            raise ShapeError(" ".join(str(error).split())) from None

    def write(value: Any) -> Any:
        return value.model_dump(mode="json", by_alias=True)

    written, accepted = (
        kind.model_json_schema(mode=mode, schema_generator=Schemas) for mode in ("serialization", "validation")
    )
    return Shape(read, write, _without_texts(written), _without_texts(accepted))


def _without_texts(schema: Any) -> Any:
    """Return the schema without titles and descriptions, which no reader depends on."""
    if isinstance(schema, list):
        return [_without_texts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: Schema = {}
    for name, value in schema.items():
        if name in ("properties", "$defs"):
            kept[name] = {inner: _without_texts(one) for inner, one in value.items()}
        elif name not in ("title", "description"):
            kept[name] = _without_texts(value)
    return kept


# -- dataclasses -----------------------------------------------------------------------------------


def _shape_of_dataclass(kind: type) -> Shape:
    builder = _Builder()
    codec = builder.record(kind)
    definitions = {known.__name__: one.schema for known, one in builder.records.items() if known is not kind}
    if kind.__name__ in definitions or len(definitions) + 1 != len(builder.records):
        raise ConfigurationError(
            f"{kind.__qualname__} contains two dataclasses of the same name, but the JSON Schema of the event names "
            "each once: rename one of them."
        )
    schema = dict(codec.schema)
    if builder.is_referenced(kind):
        schema = {"$ref": f"#/$defs/{kind.__name__}"}
        definitions[kind.__name__] = codec.schema
    if definitions:
        schema["$defs"] = definitions
    return Shape(codec.read, codec.write, schema, schema)


@dataclass(slots=True)
class _Codec:
    """How one annotation is read and written, and its schema. `family` is the JSON type, which a union tells apart."""

    read: Convert
    write: Convert
    schema: Schema
    family: str = ""


def _refuse(expected: str, value: Any) -> ShapeError:
    return ShapeError(f"expected {expected}, got {type(value).__name__} {value!r:.60}")


def _same(value: Any) -> Any:
    return value


def _accepting(expected: str, fits: Callable[[Any], bool], convert: Convert = _same) -> Convert:
    def check(value: Any) -> Any:
        if fits(value):
            return convert(value)
        raise _refuse(expected, value)

    return check


def _parsed(expected: str, parse: Convert) -> Convert:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise _refuse(expected, value)
        try:
            return parse(value)
        except (ValueError, InvalidOperation, OverflowError):
            raise _refuse(expected, value) from None

    return read


_DURATION: Final = re.compile(
    r"(?P<sign>-?)P(?:(?P<days>\d+)D)?(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+(?:\.\d+)?)S)?)?"
)


def _read_duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if found is None or text.endswith(("P", "T")):
        raise ValueError(text)
    parts = found.groupdict()
    sign = -1 if parts.pop("sign") else 1
    seconds = Decimal(parts.pop("seconds") or 0)
    whole = timedelta(**{name: int(value or 0) for name, value in parts.items()}, seconds=int(seconds))
    return sign * (whole + timedelta(microseconds=int(seconds % 1 * 1_000_000)))


# Other languages read whole numbers of 64 bits, and a float takes each of them.
_LARGEST: Final = 2**63


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0


def _scalar(expected: str, fits: Callable[[Any], bool], schema: str, family: str) -> _Codec:
    check = _accepting(expected, fits)
    return _Codec(check, check, {"type": schema}, family)


def _text(expected: str, kind: type, parse: Convert, format: str) -> _Codec:
    # The topic's codec writes these values as text (see JsonCodec).
    written = _accepting(expected, lambda value: isinstance(value, kind))
    return _Codec(_parsed(expected, parse), written, {"type": "string", "format": format}, "string")


_SCALARS: Final[dict[Any, _Codec]] = {
    str: _scalar("text", lambda value: isinstance(value, str), "string", "string"),
    int: _scalar("a whole number of at most 64 bits", _is_whole, "integer", "number"),
    float: _Codec(
        _accepting("a number", _is_number, float),
        _accepting("a finite number", _is_finite),
        {"type": "number"},
        "number",
    ),
    bool: _scalar("true or false", lambda value: isinstance(value, bool), "boolean", "boolean"),
    types.NoneType: _scalar("null", lambda value: value is None, "null", "null"),
    bytes: _Codec(
        _parsed("bytes in base64", lambda value: base64.b64decode(value, validate=True)),
        _accepting("bytes", lambda value: isinstance(value, bytes), lambda value: base64.b64encode(value).decode()),
        {"type": "string", "contentEncoding": "base64"},
        "string",
    ),
    Decimal: _text("a decimal number in text", Decimal, Decimal, "decimal"),
    UUID: _text("a UUID in text", UUID, UUID, "uuid"),
    datetime: _text("a date and time in ISO 8601", datetime, datetime.fromisoformat, "date-time"),
    date: _Codec(
        _parsed("a date in ISO 8601", date.fromisoformat),
        # A datetime is a date, too.
        _accepting("a date", lambda value: type(value) is date),
        {"type": "string", "format": "date"},
        "string",
    ),
    time: _text("a time in ISO 8601", time, time.fromisoformat, "time"),
    timedelta: _text("a duration in ISO 8601", timedelta, _read_duration, "duration"),
}


_LISTS: Final[dict[Any, Callable[[list[Any]], Any]]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Set: frozenset,
}
_MAPS: Final = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass(slots=True)
class _Builder:
    """Makes the codecs of one event type. A dataclass that contains itself has one codec."""

    records: dict[type, _Codec] = field(default_factory=dict)
    _referenced: set[type] = field(default_factory=set)

    def is_referenced(self, kind: type) -> bool:
        """Whether the schema refers to this dataclass by its name."""
        return kind in self._referenced

    def record(self, kind: Any) -> _Codec:
        """Return the codec of a dataclass."""
        if kind in self.records:
            return self.records[kind]
        codec = self.records[kind] = _Codec(_same, _same, {}, "object")
        try:
            hints = typing.get_type_hints(kind, include_extras=True)
        except (NameError, TypeError) as error:
            raise ConfigurationError(
                f"the annotations of {kind.__qualname__} cannot be evaluated: {error}. Import their types at runtime, "
                "at the top level of the module."
            ) from error
        codecs: dict[str, _Codec] = {}
        required: list[str] = []
        for one in dataclasses.fields(kind):
            if not one.init:
                raise ConfigurationError(
                    f"field {one.name!r} of {kind.__qualname__} has init=False, so it could not be read: remove "
                    "init=False, or make it a property."
                )
            codecs[one.name] = self.codec(hints[one.name], f"{kind.__qualname__}.{one.name}")
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
                required.append(one.name)
        codec.read = _record_reader(kind, {name: one.read for name, one in codecs.items()}, frozenset(required))
        codec.write = _record_writer(kind, [(name, one.write) for name, one in codecs.items()])
        codec.schema = {"type": "object", "properties": {name: one.schema for name, one in codecs.items()}}
        if required:
            codec.schema["required"] = sorted(required)
        return codec

    def codec(self, annotation: Any, where: str) -> _Codec:
        """Return the codec of an annotation. Raises ConfigurationError for a type that JSON cannot tell."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if annotation is Any or annotation is object:
            return _Codec(_same, _same, {}, "any")
        if origin is typing.Annotated:
            return self.codec(arguments[0], where)
        if annotation in _SCALARS:
            return _SCALARS[annotation]
        if isinstance(annotation, typing.NewType):
            return self.codec(annotation.__supertype__, where)
        if origin is Literal:
            return _of_values({value: value for value in arguments}, where)
        if origin in (typing.Union, types.UnionType):
            return self._union([self.codec(one, where) for one in arguments], where)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return _of_values({member.value: member for member in annotation}, where)
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            self._referenced.add(annotation)
            inner = self.record(annotation)
            return _Codec(
                lambda value: inner.read(value),
                lambda value: inner.write(value),
                {"$ref": f"#/$defs/{annotation.__name__}"},
                "object",
            )
        if (origin or annotation) is tuple and arguments[-1:] != (Ellipsis,):
            return _tuple([self.codec(one, where) for one in arguments])
        if (origin or annotation) is tuple:
            return _list(self.codec(arguments[0], where), tuple)
        if (origin or annotation) in _LISTS:
            return _list(self.codec(arguments[0] if arguments else Any, where), _LISTS[origin or annotation])
        if (origin or annotation) in _MAPS:
            key, value = arguments or (str, Any)
            if key is not str:
                raise ConfigurationError(
                    f"{where}: the keys of a JSON object are text, so annotate it as dict[str, …]."
                )
            return _map(self.codec(value, where))
        raise ConfigurationError(
            f"{where} has the type {annotation!r}, which an event cannot have: use str, int, float, bool, None, "
            "Decimal, UUID, datetime, date, time, timedelta, bytes, an Enum, Literal, list, tuple, set, dict[str, …], "
            "another dataclass, or a union of them."
        )

    @staticmethod
    def _union(codecs: list[_Codec], where: str) -> _Codec:
        families = [one.family for one in codecs]
        if len(set(families)) != len(families) or "any" in families:
            raise ConfigurationError(
                f"{where} is a union whose members look alike in JSON ({', '.join(families)}), so a reader could not "
                "tell them apart: use one type, or separate fields."
            )
        schema = {"anyOf": [one.schema for one in codecs]}
        by_family = dict(zip(families, codecs, strict=True))

        def read(value: Any) -> Any:
            found = by_family.get(_family(value))
            if found is None:
                raise _refuse(" or ".join(families), value)
            return found.read(value)

        def write(value: Any) -> Any:
            error: ShapeError | None = None
            for one in codecs:
                try:
                    return one.write(value)
                except ShapeError as refused:
                    error = refused if error is None or refused.path else error
            raise error or _refuse("a value of the union", value)

        return _Codec(read, write, schema, "|".join(families))


def _family(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    names: dict[type, str] = {str: "string", types.NoneType: "null", list: "array", dict: "object"}
    return names.get(type(value), "")


def _of_values(values: Mapping[Any, Any], where: str) -> _Codec:
    families = {_family(value) for value in values}
    if len(families) != 1 or not families <= {"string", "number"} or any(isinstance(v, float) for v in values):
        raise ConfigurationError(f"{where}: the values of an Enum or Literal must be all texts, or all whole numbers.")
    texts = ", ".join(map(repr, values))

    def read(value: Any) -> Any:
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value in values:
            return values[value]
        raise _refuse(f"one of {texts}", value)

    written = {member: value for value, member in values.items()}

    def write(value: Any) -> Any:
        if isinstance(value, (str, int, enum.Enum)) and not isinstance(value, bool) and value in written:
            return written[value]
        raise _refuse(f"one of {texts}", value)

    [family] = families
    kind = "string" if family == "string" else "integer"
    return _Codec(read, write, {"type": kind, "enum": list(values)}, family)


def _items(convert: Convert, values: Any) -> list[Any]:
    found: list[Any] = []
    for place, value in enumerate(values):
        try:
            found.append(convert(value))
        except ShapeError as error:
            raise error.inside(f"[{place}]") from None
    return found


def _list(item: _Codec, make: Callable[[list[Any]], Any]) -> _Codec:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _refuse("a list", value)
        return make(_items(item.read, value))

    def write(value: Any) -> Any:
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise _refuse("a list", value)
        return _items(item.write, value)

    return _Codec(read, write, {"type": "array", "items": item.schema}, "array")


def _tuple(items: list[_Codec]) -> _Codec:
    def convert(
        value: Any, kinds: tuple[type[list[Any]] | type[tuple[Any, ...]], ...], converts: list[Convert]
    ) -> list[Any]:
        if not isinstance(value, kinds) or len(value) != len(items):
            raise _refuse(f"a list of {len(items)} values", value)
        return [_items(one, [inner])[0] for one, inner in zip(converts, value, strict=True)]

    reads, writes = [one.read for one in items], [one.write for one in items]
    schema = {
        "type": "array",
        "prefixItems": [one.schema for one in items],
        "minItems": len(items),
        "maxItems": len(items),
    }
    return _Codec(
        lambda value: tuple(convert(value, (list,), reads)),
        lambda value: convert(value, (tuple, list), writes),
        schema,
        "array",
    )


def _map(item: _Codec) -> _Codec:
    def convert(value: Any, one: Convert) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _refuse("an object", value)
        found: dict[str, Any] = {}
        for name, inner in value.items():
            if not isinstance(name, str):
                raise _refuse("text as the key of an object", name)
            try:
                found[name] = one(inner)
            except ShapeError as error:
                raise error.inside(name) from None
        return found

    return _Codec(
        lambda value: convert(value, item.read),
        lambda value: convert(value, item.write),
        {"type": "object", "additionalProperties": item.schema},
        "object",
    )


def _record_reader(kind: type, reads: Mapping[str, Convert], required: frozenset[str]) -> Convert:
    fields = tuple(reads.items())

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse("an object", value)
        values: dict[str, Any] = {}
        for name, convert in fields:
            if name in value:
                try:
                    values[name] = convert(value[name])
                except ShapeError as error:
                    raise error.inside(name) from None
            elif name in required:
                raise ShapeError("the field is required and absent", (name,))
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{kind.__qualname__} refused the values: {shown_text(error)}") from error

    return read


def _record_writer(kind: type, fields: list[tuple[str, Convert]]) -> Convert:
    def write(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _refuse(kind.__qualname__, value)
        written: dict[str, Any] = {}
        for name, convert in fields:
            try:
                written[name] = convert(getattr(value, name))
            except ShapeError as error:
                raise error.inside(name) from None
        return written

    return write
