"""Parses the text of a filter into conditions, with a tokeniser and recursive descent (see outbox.filters.filter)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from outbox.errors import InvalidFilter
from outbox.filters.conditions import (
    COMPARISONS,
    Between,
    Comparison,
    FilterNode,
    HeaderComparison,
    IsNull,
    Junction,
    Like,
    Membership,
    Not,
    Value,
)

MAX_LENGTH: Final = 4096
MAX_DEPTH: Final = 50

_TOKEN = re.compile(
    r"""(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?![A-Za-z0-9_.]))
      | (?P<string>'(?:[^']|'')*')
      | (?P<quoted>"[A-Za-z_][A-Za-z0-9_\-]*")
      | (?P<word>[A-Za-z_][A-Za-z0-9_\-]*)
      | (?P<symbol><>|!=|<=|>=|[=<>(),])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset({"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"})


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int

    @property
    def keyword(self) -> str:
        return self.text.upper() if self.kind == "word" and self.text.upper() in _KEYWORDS else ""


def parse_expression(text: str, start: int) -> FilterNode:
    """Parse `text[start:]`. Raises InvalidFilter, which shows the column in `text` (from 1) and a caret below it."""
    if len(text) > MAX_LENGTH:
        raise InvalidFilter(f"the filter has {len(text)} characters, the limit is {MAX_LENGTH}.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidFilter("the filter contains a lone surrogate, which is not text.")
    return _Parser(text, start).parse()


class _Parser:
    """A recursive-descent parser of the tokens. NOT binds stronger than AND, and AND binds stronger than OR."""

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._tokens = self._tokenise(start)
        self._position = 0
        self._depth = 0

    def parse(self) -> FilterNode:
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
                raise self._error(position, "this quote is never closed" if quote else "this text is not allowed here")
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
        """If the next keyword or symbol is in `words`, consume and return it. If it is not, return ''."""
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

    def _junction(self, word: str) -> FilterNode:
        conditions = [self._junction("AND") if word == "OR" else self._negation()]
        while self._accept(word):
            conditions.append(self._junction("AND") if word == "OR" else self._negation())
        return conditions[0] if len(conditions) == 1 else Junction(word, tuple(conditions))

    def _negation(self) -> FilterNode:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(self._token.at, f"nested deeper than {MAX_DEPTH}")
        if self._accept("NOT"):
            condition: FilterNode = Not(self._negation())
        elif self._accept("("):
            condition = self._junction("OR")
            self._require(")")
        else:
            condition = self._predicate()
        self._depth -= 1
        return condition

    def _predicate(self) -> FilterNode:
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

    def _comparison(self, name: str) -> FilterNode:
        token = self._token
        operator = self._accept("=", "<>", "!=", "<", "<=", ">", ">=").replace("!=", "<>")
        if operator not in COMPARISONS:
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


def _negate(condition: FilterNode, negated: bool) -> FilterNode:
    return Not(condition) if negated else condition
