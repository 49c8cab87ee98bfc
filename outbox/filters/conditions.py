"""The conditions of the SQL92 subset: the tree that `parser` builds, and how it is evaluated (true, false, unknown).

`outbox.broker.consumer.fetch` converts the same tree to SQL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Protocol

TAG_NAME: Final = "TAGS"
# A header that matches this pattern counts as a number. The pattern has no exponent, because a short text with an
# exponent could overflow the server's number type.
NUMBER: Final = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)"
COMPARISONS: Final = frozenset({"=", "<>", "<", "<=", ">", ">="})

_NUMBER: Final = re.compile(NUMBER)

Value = str | Decimal


class FilterNode(Protocol):
    """A node of the tree of conditions."""

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """Return True or False, or None if the result is unknown."""


def lookup(name: str, tag: str, headers: Mapping[str, str]) -> str | None:
    """Return the value of a header or of TAGS, or None."""
    return (tag or None) if name == TAG_NAME else headers.get(name)


def as_number(value: str) -> Decimal | None:
    """Return the number in a header's text, or None."""
    return Decimal(value) if _NUMBER.fullmatch(value) else None


def _operand(name: str, like: Value, tag: str, headers: Mapping[str, str]) -> Value | None:
    """Return the value of the header `name`, converted so that it can be compared with `like`.

    If `like` is a number, the result is the number in the header's text, or None.
    """
    value = lookup(name, tag, headers)
    return as_number(value) if value is not None and isinstance(like, Decimal) else value


def _compare(left: Value, operator: str, right: Value) -> bool:
    if operator == "=":
        return left == right
    if operator == "<>":
        return left != right
    # _operand has converted the left value to the type of the right value.
    below, equal = left < right, left == right  # type: ignore[operator]
    return {"<": below, "<=": below or equal, ">": not below and not equal, ">=": not below}[operator]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The condition `name operator value`."""

    name: str
    operator: str
    value: Value

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        operand = _operand(self.name, self.value, tag, headers)
        return None if operand is None else _compare(operand, self.operator, self.value)


@dataclass(frozen=True, slots=True)
class HeaderComparison:
    """The condition `name = other` or `name <> other`. The condition compares two headers as strings."""

    name: str
    operator: str
    other: str

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        left, right = lookup(self.name, tag, headers), lookup(self.other, tag, headers)
        return None if left is None or right is None else _compare(left, self.operator, right)


@dataclass(frozen=True, slots=True)
class Between:
    """The condition `name BETWEEN low AND high`."""

    name: str
    low: Value
    high: Value

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        operand = _operand(self.name, self.low, tag, headers)
        if operand is None:
            return None
        return _compare(operand, ">=", self.low) and _compare(operand, "<=", self.high)


@dataclass(frozen=True, slots=True)
class Membership:
    """The condition `name IN (values)`. The values are all strings or all numbers."""

    name: str
    values: tuple[Value, ...]

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        operand = _operand(self.name, self.values[0], tag, headers)
        return None if operand is None else operand in self.values


@dataclass(frozen=True, slots=True)
class Like:
    """The condition `name LIKE pattern`: % is any text, _ any character. `escape` makes the next character literal."""

    name: str
    pattern: str
    escape: str

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        value = lookup(self.name, tag, headers)
        return None if value is None else re.fullmatch(self._expression(), value, re.DOTALL) is not None

    def _expression(self) -> str:
        # For each part of the pattern between two %, the first match in the value is the right match, because it leaves
        # the most text for the later parts. The atomic groups `(?>…)` fix each first match. Without these groups, the
        # time for a value that does not match would grow exponentially with the number of %.
        parts = [""]
        characters = iter(self.pattern)
        for character in characters:
            if character == self.escape:
                parts[-1] += re.escape(next(characters))
            elif character == "%":
                parts.append("")
            else:
                parts[-1] += "." if character == "_" else re.escape(character)
        first, *middle = parts
        if not middle:
            return first
        last = middle.pop()
        return "".join([first, *(f"(?>.*?{part})" for part in middle if part), ".*", last])


@dataclass(frozen=True, slots=True)
class IsNull:
    """The condition `name IS NULL`."""

    name: str

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        return lookup(self.name, tag, headers) is None


@dataclass(frozen=True, slots=True)
class Not:
    """The condition `NOT condition`."""

    condition: FilterNode

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        value = self.condition.evaluate(tag, headers)
        return None if value is None else not value


@dataclass(frozen=True, slots=True)
class Junction:
    """The condition `a AND b AND …` (`word` is AND) or `a OR b OR …` (`word` is OR)."""

    word: str
    conditions: tuple[FilterNode, ...]

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        decisive = self.word == "OR"
        values = [condition.evaluate(tag, headers) for condition in self.conditions]
        if decisive in values:
            return decisive
        return None if None in values else not decisive
