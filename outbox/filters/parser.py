"""The SQL92 subset of filters: its tokens, its tree, its three-valued evaluation (see outbox.filters.filter)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Protocol

from outbox.errors import InvalidFilter

TAG_NAME: Final = "TAGS"
MAX_LENGTH: Final = 4096
MAX_DEPTH: Final = 50
# What a header must look like to count as a number. No exponents: they would let a short text overflow the server.
NUMBER: Final = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)"

_NUMBER = re.compile(NUMBER)
_TOKEN = re.compile(
    r"""(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?![A-Za-z0-9_.]))
      | (?P<string>'(?:[^']|'')*')
      | (?P<quoted>"[A-Za-z_][A-Za-z0-9_\-]*")
      | (?P<word>[A-Za-z_][A-Za-z0-9_\-]*)
      | (?P<symbol><>|!=|<=|>=|[=<>(),])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset({"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"})
_COMPARISONS = frozenset({"=", "<>", "<", "<=", ">", ">="})

Value = str | Decimal


class Condition(Protocol):
    """A node of the tree."""

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """True, False, or None for unknown."""


def lookup(name: str, tag: str, headers: Mapping[str, str]) -> str | None:
    """The value a name stands for."""
    return (tag or None) if name == TAG_NAME else headers.get(name)


def as_number(value: str) -> Decimal | None:
    """The number a header spells, if it spells one."""
    return Decimal(value) if _NUMBER.fullmatch(value) else None


def _operand(name: str, like: Value, tag: str, headers: Mapping[str, str]) -> Value | None:
    """The header as the type of what it is compared with."""
    value = lookup(name, tag, headers)
    return as_number(value) if value is not None and isinstance(like, Decimal) else value


def _compare(left: Value, operator: str, right: Value) -> bool:
    if operator == "=":
        return left == right
    if operator == "<>":
        return left != right
    # Both are of one type: _operand saw to it.
    below, equal = left < right, left == right  # type: ignore[operator]
    return {"<": below, "<=": below or equal, ">": not below and not equal, ">=": not below}[operator]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`name operator value`"""

    name: str
    operator: str
    value: Value

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        operand = _operand(self.name, self.value, tag, headers)
        return None if operand is None else _compare(operand, self.operator, self.value)


@dataclass(frozen=True, slots=True)
class HeaderComparison:
    """`name = other` or `name <> other`, as strings."""

    name: str
    operator: str
    other: str

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        left, right = lookup(self.name, tag, headers), lookup(self.other, tag, headers)
        return None if left is None or right is None else _compare(left, self.operator, right)


@dataclass(frozen=True, slots=True)
class Between:
    """`name BETWEEN low AND high`"""

    name: str
    low: Value
    high: Value

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        operand = _operand(self.name, self.low, tag, headers)
        if operand is None:
            return None
        return _compare(operand, ">=", self.low) and _compare(operand, "<=", self.high)


@dataclass(frozen=True, slots=True)
class Membership:
    """`name IN (values)`; the values are all strings or all numbers."""

    name: str
    values: tuple[Value, ...]

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        operand = _operand(self.name, self.values[0], tag, headers)
        return None if operand is None else operand in self.values


@dataclass(frozen=True, slots=True)
class Like:
    """`name LIKE pattern`: % is any text, _ any character, `escape` (if any) takes the next one literally."""

    name: str
    pattern: str
    escape: str

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        value = lookup(self.name, tag, headers)
        return None if value is None else re.fullmatch(self._expression(), value, re.DOTALL) is not None

    def _expression(self) -> str:
        # Between two % a part may take its first place and keep it: what follows has the most room then. The atomic
        # groups say so; without them a value that does not match costs time exponential in the number of %.
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
    """`name IS NULL`"""

    name: str

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        return lookup(self.name, tag, headers) is None


@dataclass(frozen=True, slots=True)
class Not:
    """`NOT condition`"""

    condition: Condition

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        value = self.condition.evaluate(tag, headers)
        return None if value is None else not value


@dataclass(frozen=True, slots=True)
class Junction:
    """`a AND b AND …` (`word` is AND) or `a OR b OR …`."""

    word: str
    conditions: tuple[Condition, ...]

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool | None:
        """See Condition."""
        decisive = self.word == "OR"
        values = [condition.evaluate(tag, headers) for condition in self.conditions]
        if decisive in values:
            return decisive
        return None if None in values else not decisive


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int

    @property
    def keyword(self) -> str:
        return self.text.upper() if self.kind == "word" and self.text.upper() in _KEYWORDS else ""


def parse_expression(text: str, start: int) -> Condition:
    """The tree of `text[start:]`. Raises InvalidFilter with the column in `text` (from 1) and a caret under it."""
    if len(text) > MAX_LENGTH:
        raise InvalidFilter(f"the filter has {len(text)} characters, the limit is {MAX_LENGTH}.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidFilter("the filter contains a lone surrogate, which is not text.")
    return _Parser(text, start).parse()


class _Parser:
    """Recursive descent over the tokens; OR binds weaker than AND, AND weaker than NOT."""

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._tokens = self._tokenise(start)
        self._position = 0
        self._depth = 0

    def parse(self) -> Condition:
        condition = self._junction("OR")
        if self._token.kind != "end":
            raise self._expected("AND, OR or the end")
        return condition

    # -- tokens ---------------------------------------------------------------------------------

    def _tokenise(self, position: int) -> list[_Token]:
        tokens: list[_Token] = []
        while position < len(self._text):
            if self._text[position].isspace():
                position += 1
                continue
            match = _TOKEN.match(self._text, position)
            if match is None:
                quote = self._text[position] in "'\""
                raise self._error(position, "this quote is never closed" if quote else "this is not allowed here")
            tokens.append(_Token(str(match.lastgroup), match.group(), position))
            position = match.end()
        return [*tokens, _Token("end", "", len(self._text))]

    @property
    def _token(self) -> _Token:
        return self._tokens[self._position]

    def _next(self) -> _Token:
        token = self._token
        self._position += 1
        return token

    def _accept(self, *words: str) -> str:
        """The keyword or symbol that comes next, consumed, if it is one of `words`; else ''."""
        token = self._token
        found = token.keyword or (token.text if token.kind == "symbol" else "")
        if found not in words:
            return ""
        self._position += 1
        return found

    def _require(self, word: str) -> None:
        if not self._accept(word):
            raise self._expected(word)

    def _expected(self, what: str) -> InvalidFilter:
        found = f", not {self._token.text!r}" if self._token.text else ""
        return self._error(self._token.at, f"expected {what}{found}")

    def _error(self, at: int, problem: str) -> InvalidFilter:
        line = "".join(" " if character.isspace() else character for character in self._text)
        return InvalidFilter(f"filter, column {at + 1}: {problem}\n  {line}\n  {' ' * at}^")

    # -- grammar --------------------------------------------------------------------------------

    def _junction(self, word: str) -> Condition:
        conditions = [self._junction("AND") if word == "OR" else self._negation()]
        while self._accept(word):
            conditions.append(self._junction("AND") if word == "OR" else self._negation())
        return conditions[0] if len(conditions) == 1 else Junction(word, tuple(conditions))

    def _negation(self) -> Condition:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(self._token.at, f"nested deeper than {MAX_DEPTH}")
        if self._accept("NOT"):
            condition: Condition = Not(self._negation())
        elif self._accept("("):
            condition = self._junction("OR")
            self._require(")")
        else:
            condition = self._predicate()
        self._depth -= 1
        return condition

    def _predicate(self) -> Condition:
        name = self._name()
        if self._accept("IS"):
            negated = bool(self._accept("NOT"))
            self._require("NULL")
            return _negate(IsNull(name), negated)
        negated = bool(self._accept("NOT"))
        word = self._accept("IN", "BETWEEN", "LIKE")
        if word == "IN":
            return _negate(Membership(name, self._values()), negated)
        if word == "BETWEEN":
            low = self._value()
            self._require("AND")
            return _negate(Between(name, low, self._value(like=low)), negated)
        if word == "LIKE":
            return _negate(self._like(name), negated)
        if negated:
            raise self._expected("IN, BETWEEN or LIKE after NOT")
        return self._comparison(name)

    def _comparison(self, name: str) -> Condition:
        token = self._token
        operator = self._accept("=", "<>", "!=", "<", "<=", ">", ">=").replace("!=", "<>")
        if operator not in _COMPARISONS:
            raise self._expected("a comparison, IN, BETWEEN, LIKE or IS")
        if self._token.kind == "quoted" or (self._token.kind == "word" and not self._token.keyword):
            if operator not in ("=", "<>"):
                raise self._error(token.at, f"two headers can be compared with = and <> only, not with {operator}")
            return HeaderComparison(name, operator, self._name())
        return Comparison(name, operator, self._value())

    def _name(self) -> str:
        token = self._token
        if token.kind == "quoted":
            return self._next().text[1:-1]
        if token.kind != "word" or token.keyword:
            raise self._expected("the name of a header")
        return self._next().text

    def _value(self, *, like: Value | None = None) -> Value:
        token = self._token
        if token.kind not in ("number", "string"):
            raise self._expected("a number or a 'string'")
        value: Value = Decimal(token.text) if token.kind == "number" else self._string(token)
        if like is not None and type(like) is not type(value):
            raise self._error(token.at, "numbers and strings cannot be mixed here")
        self._position += 1
        return value

    def _string(self, token: _Token) -> str:
        value = token.text[1:-1].replace("''", "'")
        if "\x00" in value:
            raise self._error(token.at, "a string cannot contain NUL")
        return value

    def _values(self) -> tuple[Value, ...]:
        self._require("(")
        values = [self._value()]
        while self._accept(","):
            values.append(self._value(like=values[0]))
        self._require(")")
        return tuple(values)

    def _like(self, name: str) -> Like:
        token = self._token
        if token.kind != "string":
            raise self._expected("a 'pattern'")
        pattern = self._string(self._next())
        escape = ""
        if self._accept("ESCAPE"):
            escape_token = self._token
            if escape_token.kind != "string" or len(escape := self._string(escape_token)) != 1:
                raise self._expected("one 'character'")
            self._next()
            if re.fullmatch(f"(?:{re.escape(escape)}.|[^{re.escape(escape)}])*", pattern, re.DOTALL) is None:
                raise self._error(token.at, "the pattern ends with its escape character")
        return Like(name, pattern, escape)


def _negate(condition: Condition, negated: bool) -> Condition:
    return Not(condition) if negated else condition
