"""Reads typed values from TOML tables, and reports each error with the path of its key, as in rule['paid'].grace."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

from ..common.options import parse_duration

Choice = TypeVar("Choice", bound=StrEnum)


class TomlTable:
    def __init__(self, problems: list[str], values: Any, path: str, allowed: tuple[str, ...]) -> None:
        """`problems` gets the errors. `path` is the path of the table; '' for the file."""
        self._problems, self._path = problems, path
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        if not isinstance(values, dict):
            self.problem(None, "must be a table", "write it as [section] or [[section]]")
        for key in self.values:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, 1)
                remedy = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(allowed)}"
                self.problem(key, "unknown key", remedy)

    def problem(self, key: str | None, what: str, remedy: str) -> None:
        """Report an error at a key of this table, or at the table itself if `key` is None."""
        self._problems.append(f"{self._at(key) or 'file'}: {what}; {remedy}{'' if remedy.endswith('?') else '.'}")

    def _at(self, key: str | None) -> str:
        return ".".join(filter(None, (self._path, key)))

    def text(self, key: str) -> str | None:
        """The text of a key, which must not be empty; None if the key is missing."""
        value: object = self.values.get(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        self.problem(key, f"must be a text that is not empty, got {value!r}", f'write {key} = "…"')
        return None

    def required(self, key: str) -> str:
        """The text of a required key. If the key is missing, report an error and return ''."""
        if key not in self.values:
            self.problem(key, "missing", f'add {key} = "…"')
        return self.text(key) or ""

    def flag(self, key: str) -> bool:
        """The boolean value of a key; false if the key is missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, got {value!r}", f"write {key} = true")
            return False
        return value

    def choice(self, key: str, choices: Iterable[Choice], default: Choice) -> Choice:
        """The value of a key as one of `choices`, which may be a whole enumeration."""
        value = self.values.get(key, default.value)
        for choice in choices:
            if choice == value:
                return choice
        self.problem(key, f"unknown value {value!r}", f"use one of: {', '.join(choices)}")
        return default

    def spans(self, *keys: str) -> dict[str, Any]:
        """The durations that the table gives, as `<key>_seconds`."""
        given = {f"{key}_seconds": self.seconds(key) for key in keys if key in self.values}
        return {name: seconds for name, seconds in given.items() if seconds is not None}

    def seconds(self, key: str) -> float | None:
        """The duration of a key that the table has, in seconds; None if it is no duration."""
        value = self.values[key]
        seconds = parse_duration(value) if isinstance(value, str) else None
        if seconds is None:
            remedy = 'write a number and a unit (ms, s, m, h, d), as in "5m", at most 36500d'
            self.problem(key, f"not a duration: {value!r}", remedy)
        return seconds

    def tables(self, key: str) -> list[tuple[Any, str]]:
        """The tables of an array, each with its path, which has the name of the table, or its number from 1."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.problem(key, "must be an array of tables", f"write [[{key}]]")
            return []
        return [(item, f"{self._at(key)}[{_label(item, number)}]") for number, item in enumerate(value, 1)]


def _label(item: Any, number: int) -> str:
    name = (item.get("name") or item.get("column")) if isinstance(item, dict) else None
    return repr(name) if isinstance(name, str) else str(number)
