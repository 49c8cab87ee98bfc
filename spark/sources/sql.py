"""The SQL text of a selection, for PostgreSQL. This module quotes names and values, and uses the expressions of the
rules file unchanged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from . import bounded
from .base import Column, ColumnKind, TableSelection

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_INTEGER: Final = re.compile(r"0|-?[1-9]\d{0,18}")
_BIGINT: Final = range(-(2**63), 2**63)
_UUID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_INTEGER_TYPES: Final = ("smallint", "integer", "bigint")


def name(identifier: str) -> str:
    """A quoted identifier."""
    return '"' + identifier.replace('"', '""') + '"'


def table_name(table: str, schema: str | None = None) -> str:
    """A quoted name of a table, with the schema if the rules give one."""
    parts = table.split(".") if schema is None else [schema, table]
    return ".".join(name(part) for part in parts)


def text(value: str) -> str:
    """A quoted text constant. The function removes NUL characters, which a text in PostgreSQL cannot contain."""
    return "'" + value.replace("\0", "").replace("'", "''") + "'"


def moment(value: datetime) -> str:
    """A quoted timestamp."""
    return f"'{value.isoformat()}'::timestamptz"


def expression(source: str) -> str:
    """A column name quoted, or an expression in parentheses."""
    return name(source) if _NAME.fullmatch(source) else f"({source})"


def is_column(source: str) -> bool:
    """Whether an expression is a plain column name."""
    return _NAME.fullmatch(source) is not None


def column(wanted: Column) -> str:
    """One item of the SELECT list."""
    value = expression(wanted.expression)
    moment = f"{value}::timestamptz"
    as_kind = {
        ColumnKind.TEXT: f"{value}::text",
        ColumnKind.BIGINT: f"{value}::bigint",
        # Arrow has no infinite times, and would give finite times instead.
        ColumnKind.TIMESTAMP: f"CASE WHEN isfinite({moment}) THEN {moment} END" if wanted.compared_as else moment,
        ColumnKind.BINARY: f"{value}::bytea",
        ColumnKind.MICROSECONDS: f"CASE WHEN isfinite({moment}) THEN (extract(epoch FROM {value}) * 1000000)"
        f"::bigint::text ELSE {value}::text END",
        ColumnKind.BOUNDED: bounded.in_sql(f"{value}::text"),
    }
    return f"{as_kind[wanted.kind]} AS {name(wanted.name)}"


def conditions(selection: TableSelection, since: datetime | None, until: datetime | None = None) -> list[str]:
    """The conditions of the selection's WHERE clause."""
    terms = [f"({condition})" for condition in selection.conditions]
    terms += [f"{name(key)} = {text(value)}" for key, value in selection.equals]
    if selection.time is not None:
        time = expression(selection.time)
        terms.append(f"{time} IS NOT NULL" if since is None else f"{time} >= {moment(since)}")
        if until is not None:
            terms.append(f"{time} < {moment(until)}")
    return terms


def select(selection: TableSelection, table: str, terms: Sequence[str]) -> str:
    """SELECT … FROM … WHERE …; `table` is quoted."""
    items = ", ".join(column(wanted) for wanted in selection.columns)
    return f"SELECT {items} FROM {table}{where(terms)}"


def step(items: Sequence[str], source: str) -> str:
    """A subquery whose columns are computed once, also in parallel workers.

    PostgreSQL copies the expression of a subquery's column to each use of the column, and would parse a body nine
    times. If a column of the subquery is volatile, PostgreSQL makes no copies. OFFSET 0 and MATERIALIZED prevent the
    copies too, but they also prevent parallel workers. The checksums of ten million messages take 26 s instead of 94 s.
    """
    return f"SELECT clock_timestamp() AS fence, {', '.join(items)} FROM {source}"


def where(terms: Sequence[str]) -> str:
    """A WHERE clause with the given terms, joined by AND; empty if there are no terms."""
    return f" WHERE {' AND '.join(terms)}" if terms else ""


def keys_condition(key: str, column_type: str | None, keys: Sequence[str]) -> str:
    """A condition for the rows that have one of the given keys.

    The condition can use an index if the key is a column of type integer, uuid or text. Else the condition compares the
    key as text. The condition does not contain keys that cannot be values of the column's type, because such keys match
    no row. The empty key also finds rows whose key is null.
    """
    term = _keys_term(key, column_type, keys)
    return f"({term} OR {expression(key)} IS NULL)" if "" in keys else term


def _keys_term(key: str, column_type: str | None, keys: Sequence[str]) -> str:
    if is_column(key) and column_type in _INTEGER_TYPES:
        numbers = [k for k in keys if _INTEGER.fullmatch(k) and int(k) in _BIGINT]
        return f"{name(key)} = ANY({_array(numbers)}::bigint[])"
    if is_column(key) and column_type == "uuid":
        return f"{name(key)} = ANY({_array([k for k in keys if _UUID.fullmatch(k)])}::uuid[])"
    value = name(key) if is_column(key) and column_type == "text" else f"{expression(key)}::text"
    return f"{value} = ANY({_array([k for k in keys if chr(0) not in k])}::text[])"


def _array(values: Sequence[str]) -> str:
    items = ",".join('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values)
    return text("{" + items + "}")
