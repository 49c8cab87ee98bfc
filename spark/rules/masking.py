"""Masking: a run compares masked fields, but does not show their values. The run shows the other parts of a body
unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from .rule import FieldRule, Rule

HIDDEN: Final = "(masked)"
NOT_JSON: Final = "(masked: the body is not one readable JSON text, so its fields cannot be masked one by one)"
_SPACE: Final = " \t\r\n"
_DECODER: Final = json.JSONDecoder()


def is_masked(rule: Rule, field: FieldRule) -> bool:
    """Whether the rule masks a compared field: by its column, or by a part of its path in the body."""
    path = field.body.split(".")
    prefixes = (".".join(path[: length + 1]) for length in range(len(path)))
    return not {field.column, *path, *prefixes}.isdisjoint(rule.mask)


def shown(rule: Rule, field: FieldRule, value: Column) -> Column:
    """A compared value in the form that a finding may show. A value of a masked field becomes HIDDEN; a null stays
    null."""
    return F.when(value.isNotNull(), F.lit(HIDDEN)) if is_masked(rule, field) else value


def shown_body(rule: Rule, body: Column, otherwise: Column, longest: int) -> Column:
    """The text of a body as a finding may show it, cut to `longest` characters. If the rule masks no field, the result
    is the column `otherwise`."""
    if not rule.mask:
        return otherwise
    names = [*rule.mask, *(field.body for field in rule.fields if is_masked(rule, field))]
    hide = F.udf(lambda text: None if text is None else masked(text, names), "string")
    return F.substring(hide(body), 1, longest)


def masked(text: str, names: Sequence[str]) -> str:
    """A JSON text in which the values of the fields `names` are replaced.

    Each of the `names` is the name of a field at any depth, or a dotted path from the top.
    """
    parts, end = [], 0
    try:
        for start, stop in _spans(text, _skip(text, 0), (), names):
            parts += [text[end:start], f'"{HIDDEN}"']
            end = stop
        _DECODER.decode(text)
    except (ValueError, IndexError, RecursionError):
        return NOT_JSON
    return "".join([*parts, text[end:]])


def _spans(text: str, at: int, path: tuple[str, ...], names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The start and end of each value to hide, in order, inside the value that begins at `at`."""
    if text[at] not in "{[":
        return
    is_object = text[at] == "{"
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        inner = path
        if is_object:
            name, at = _DECODER.raw_decode(text, at)
            inner = (*path, str(name))
            at = _skip(text, _skip(text, at) + 1)
        end = _DECODER.raw_decode(text, at)[1]
        if is_object and (inner[-1] in names or ".".join(inner) in names):
            yield at, end
        else:
            yield from _spans(text, at, inner, names)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at
