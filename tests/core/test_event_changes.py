"""What `outbox_contract check` allows never breaks a reader: random types and changes, both sides run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import GenericAlias
from typing import Any, Literal, get_args, get_origin
from uuid import UUID

import pydantic
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from outbox.codec import JsonCodec
from outbox.events.compatibility import differences
from outbox.events.shapes import ShapeError, shape_of

# A field: its annotation, and whether it has a default. A type: its fields.
Field = tuple[Any, bool]
Fields = dict[str, Field]

SCALARS: list[Any] = [str, int, float, bool, Decimal, UUID, datetime, date, timedelta]
LITERALS: list[Any] = [Literal["a"], Literal["a", "b"], Literal["b", "c"], Literal[1, 2], Literal[1, 2, 3]]
NAMES = ["alpha", "beta", "gamma"]
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Nested:
    """A dataclass inside a type: its fields."""

    fields: tuple[tuple[str, Field], ...]


def optional(annotation: Any) -> Any:
    """The annotation with None; None is there once."""
    return annotation if isinstance(annotation, tuple) and annotation[0] == "optional" else ("optional", annotation)


def annotated(depth: int = 2) -> st.SearchStrategy[Any]:
    plain = st.sampled_from([*SCALARS, *LITERALS])
    if not depth:
        return plain
    inner = annotated(depth - 1)
    return st.one_of(
        plain,
        inner.map(optional),
        inner.map(lambda one: ("list", one)),
        inner.map(lambda one: ("map", one)),
        types(depth - 1).map(lambda fields: Nested(tuple(fields.items()))),
    )


def types(depth: int = 2) -> st.SearchStrategy[Fields]:
    return st.dictionaries(st.sampled_from(NAMES), st.tuples(annotated(depth), st.booleans()), max_size=3)


def changed_annotation(draw: Any, annotation: Any) -> Any:
    """The annotation after one random change."""
    kind = draw(st.sampled_from(["other", "wider", "inner"]))
    if kind == "inner" and isinstance(annotation, Nested):
        return Nested(tuple(changed(draw, dict(annotation.fields)).items()))
    if kind == "inner" and isinstance(annotation, tuple):
        inner = changed_annotation(draw, annotation[1])
        return optional(inner) if annotation[0] == "optional" else (annotation[0], inner)
    if kind == "wider" and isinstance(annotation, tuple) and annotation[0] == "optional":
        return annotation[1]
    if kind == "wider" and annotation is int:
        return float
    if kind == "wider" and get_origin(annotation) is Literal:
        values = get_args(annotation)
        return (
            type(values[0])
            if len(values) > 2
            else Literal[(*values, draw(st.sampled_from([7, 8])) if values[0] == 1 else "z")]
        )
    if kind == "wider":
        return optional(annotation)
    return draw(annotated(1))


def changed(draw: Any, fields: Fields) -> Fields:
    """The fields after one random change."""
    made = dict(fields)
    name = draw(st.sampled_from(NAMES))
    if name not in made:
        made[name] = (draw(annotated(1)), draw(st.booleans()))
        return made
    what = draw(st.sampled_from(["remove", "default", "annotation", "annotation"]))
    annotation, has_default = made[name]
    if what == "remove":
        del made[name]
    elif what == "default":
        made[name] = (annotation, not has_default)
    else:
        made[name] = (changed_annotation(draw, annotation), has_default)
    return made


@st.composite
def changes(draw: Any) -> tuple[Fields, Fields]:
    old = draw(types())
    new = old
    for _ in range(draw(st.integers(0, 2))):
        new = changed(draw, new)
    return old, new


# -- the two sides ---------------------------------------------------------------------------------


def annotation_of(annotation: Any, make: Any) -> Any:
    if isinstance(annotation, Nested):
        return make(dict(annotation.fields))
    if isinstance(annotation, tuple):
        inner: Any = annotation_of(annotation[1], make)
        return {
            "optional": inner | None,
            "list": GenericAlias(list, (inner,)),
            "map": GenericAlias(dict, (str, inner)),
        }[annotation[0]]
    return annotation


def default_of(annotation: Any) -> Any:
    """A value of the annotation, as a default."""
    values: dict[Any, Any] = {str: "", int: 0, float: 0.0, bool: False, Decimal: Decimal(1), UUID: UUID(int=0)}
    values |= {datetime: datetime(2026, 1, 1, tzinfo=UTC), date: date(2026, 1, 1), timedelta: timedelta(1)}
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    return values.get(annotation)


def as_dataclass(fields: Fields) -> Any:
    made = []
    for name, (annotation, has_default) in fields.items():
        kind = annotation_of(annotation, as_dataclass)
        made.append((name, kind, dataclasses.field(default=default_of(annotation))) if has_default else (name, kind))
    return dataclasses.make_dataclass(f"Made{next(_numbers)}", made, kw_only=True)


def as_model(fields: Fields) -> Any:
    made: dict[str, Any] = {}
    for name, (annotation, has_default) in fields.items():
        made[name] = (annotation_of(annotation, as_model), default_of(annotation) if has_default else ...)
    return pydantic.create_model(f"Made{next(_numbers)}", **made)


def values(annotation: Any, kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(annotation, Nested):
        return instances(dict(annotation.fields), kind)
    if isinstance(annotation, tuple):
        form, inner = annotation
        if form == "optional":
            return st.none() | values(inner, get_args(kind)[0])
        if form == "list":
            return st.lists(values(inner, get_args(kind)[0]), max_size=2)
        return st.dictionaries(st.sampled_from(NAMES), values(inner, get_args(kind)[1]), max_size=2)
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    special: dict[Any, st.SearchStrategy[Any]] = {
        float: st.floats(allow_nan=False, allow_infinity=False),
        int: st.integers(-(2**63), 2**63 - 1),
        str: st.text(max_size=5),
        Decimal: st.decimals(allow_nan=False, allow_infinity=False, places=2),
        datetime: st.datetimes(timezones=st.just(UTC)),
        timedelta: st.timedeltas(timedelta(-99), timedelta(99)),
        UUID: st.uuids(version=4),
    }
    return special.get(annotation, st.from_type(annotation))


def instances(fields: Fields, kind: Any) -> st.SearchStrategy[Any]:
    hints: Mapping[str, Any] = kind.__annotations__
    parts = {name: values(annotation, hints[name]) for name, (annotation, _) in fields.items()}
    return st.builds(kind, **parts)


@pytest.mark.parametrize("make", [as_dataclass, pytest.param(as_model, marks=pytest.mark.slow)])
def test_an_allowed_change_breaks_no_reader(make: Any) -> None:
    codec = JsonCodec()
    counts = {"allowed": 0, "refused": 0, "refused and broken": 0}

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes(), st.data())
    def run(pair: tuple[Fields, Fields], data: st.DataObject) -> None:
        writer_fields, reader_fields = pair
        written_by, read_by = make(writer_fields), make(reader_fields)
        writer, reader = shape_of(written_by), shape_of(read_by)
        found = differences(reader.accepted, writer.written)
        value = data.draw(instances(writer_fields, written_by))
        try:
            # A default that is no value of its type, such as None for a list, is never written: the writer refuses it.
            body = codec.decode(codec.encode(writer.write(value)))
        except ShapeError:
            return
        outcome = "refused" if found else "allowed"
        broken = ""
        try:
            reader.read(body)
        except ShapeError as error:
            broken = str(error)
        assert found or not broken, f"check allows {writer.written} -> {reader.accepted}, but reading fails: {broken}"
        if broken:
            outcome = "refused and broken"
        counts[outcome] += 1
        event(outcome)

    run()
    # The comparison is not vacuous: it allows changes, and it refuses changes that break readers.
    assert counts["allowed"] > 20 and counts["refused and broken"] > 5, counts
