"""Masking: a run compares masked fields, but does not show their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from ..rules.rule import FieldRule, Rule
from . import json_text

HIDDEN: Final = "(masked)"
NOT_JSON: Final = "(masked: the body is not one readable JSON text, so its fields cannot be masked one by one)"


def is_masked(rule: Rule, field: FieldRule) -> bool:
    """Whether the rule masks a compared field: by its column, or by a part of its path in the body."""
    names = {field.column}
    for path in field.paths:
        parts = path.split(".")
        names |= {*parts, *(".".join(parts[: length + 1]) for length in range(len(parts)))}
    return not names.isdisjoint(rule.mask)


def shown(rule: Rule, field: FieldRule, value: Column) -> Column:
    """A compared value in the form that a finding may show. A value of a masked field becomes HIDDEN; a null stays
    null."""
    return F.when(value.isNotNull(), F.lit(HIDDEN)) if is_masked(rule, field) else value


def shown_body(rule: Rule, body: Column, otherwise: Column, longest: int) -> Column:
    """The text of a body as a finding may show it, cut to `longest` characters. If the rule masks no field, the result
    is the column `otherwise`."""
    if not rule.mask:
        return otherwise
    names = [*rule.mask, *(path for field in rule.fields if is_masked(rule, field) for path in field.paths)]
    hide = F.udf(lambda text: None if text is None else masked(text, names), "string")
    return F.substring(hide(body), 1, longest)


def masked(text: str, names: Sequence[str]) -> str:
    """A JSON text in which the values of the fields `names` are replaced.

    Each of the `names` is the name of a field at any depth, or a dotted path from the top. Half a surrogate pair stays
    escaped, because no text of Spark can contain it.
    """
    try:
        shown_text = json_text.written(_hidden(json_text.document(text), (), names))
    except (ValueError, RecursionError):
        return NOT_JSON
    return json_text.HALF_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", shown_text)


def _hidden(value: Any, path: tuple[str, ...], names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_hidden(each, path, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: HIDDEN if name in names or ".".join((*path, name)) in names else _hidden(each, (*path, name), names)
        for name, each in value.items()
    }
