"""Filters as SQL, evaluated in the database; `outbox.filters.filter` evaluates the same tree in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from psycopg import sql

from outbox.filters.conditions import (
    NUMBER,
    TAG_NAME,
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
from outbox.filters.filter import Filter

_NUMBER_PATTERN: Final = f"^({NUMBER})$"


@dataclass
class FilterSql:
    """Builds conditions over the log row `l`; puts the values into `parameters`, named after `prefix`."""

    prefix: str = "f"
    parameters: dict[str, Any] = field(default_factory=dict)

    def condition(self, wanted: Filter) -> sql.Composable:
        """Return a boolean that is never NULL."""
        if wanted.tags:
            return sql.SQL("l.tag = ANY({}::text[])").format(self._bind(list(wanted.tags)))
        if wanted.condition is None:
            return sql.SQL("true")
        return sql.SQL("(({}) IS TRUE)").format(self._render(wanted.condition))

    def _bind(self, value: Any) -> sql.Placeholder:
        name = f"{self.prefix}{len(self.parameters)}"
        self.parameters[name] = value
        return sql.Placeholder(name)

    def _text(self, name: str) -> sql.Composable:
        if name == TAG_NAME:
            return sql.SQL("""nullif(l.tag, '') COLLATE "C" """)
        return sql.SQL("""((l.headers ->> {}::text) COLLATE "C") """).format(self._bind(name))

    def _operand(self, name: str, like: Value) -> sql.Composable:
        if not isinstance(like, Decimal):
            return self._text(name)
        # CASE guarantees that the cast sees only texts that are numbers.
        return sql.SQL("CASE WHEN {} ~ {}::text THEN ({})::numeric END").format(
            self._text(name), self._bind(_NUMBER_PATTERN), self._text(name)
        )

    def _value(self, value: Value) -> sql.Composable:
        kind = sql.SQL("{}::numeric" if isinstance(value, Decimal) else "{}::text")
        return kind.format(self._bind(value))

    def _render(self, node: FilterNode) -> sql.Composable:
        match node:
            case Comparison(name, operator, value):
                return sql.SQL("({} {} {})").format(
                    self._operand(name, value), _OPERATORS[operator], self._value(value)
                )
            case HeaderComparison(name, operator, other):
                return sql.SQL("({} {} {})").format(self._text(name), _OPERATORS[operator], self._text(other))
            case Between(name, low, high):
                return sql.SQL("({} BETWEEN {} AND {})").format(
                    self._operand(name, low), self._value(low), self._value(high)
                )
            case Membership(name, values):
                kind = sql.SQL("numeric[]" if isinstance(values[0], Decimal) else "text[]")
                return sql.SQL("({} = ANY({}::{}))").format(
                    self._operand(name, values[0]), self._bind(list(values)), kind
                )
            case Like(name, pattern, escape):
                return sql.SQL("({} LIKE {}::text ESCAPE {}::text)").format(
                    self._text(name), self._bind(pattern), self._bind(escape)
                )
            case IsNull(name):
                return sql.SQL("({} IS NULL)").format(self._text(name))
            case Not(inner):
                return sql.SQL("(NOT {})").format(self._render(inner))
            case Junction(word, conditions):
                joiner = sql.SQL(" AND " if word == "AND" else " OR ")
                return sql.SQL("({})").format(joiner.join([self._render(inner) for inner in conditions]))
        raise AssertionError(f"no SQL for {node!r}")


_OPERATORS: Final = {
    "=": sql.SQL("="),
    "<>": sql.SQL("<>"),
    "<": sql.SQL("<"),
    "<=": sql.SQL("<="),
    ">": sql.SQL(">"),
    ">=": sql.SQL(">="),
}
