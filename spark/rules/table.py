"""Reading one TOML table: typed access, each error at its line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, TypeVar

from .toml_lines import Path as TomlPath

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Choice = TypeVar("Choice", bound=StrEnum)


class TomlTable:
    """One TOML table while it is being read: typed access, each error at its line."""

    def __init__(
        self, report: Callable[[TomlPath, str], None], values: Any, path: TomlPath, allowed: tuple[str, ...]
    ) -> None:
        self._report, self.path = report, path
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        if not isinstance(values, dict):
            self.problem(None, "must be a table", "write it as [section] or [[section]]")
        for key in self.values:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, 1)
                remedy = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(allowed)}"
                self.problem(key, "unknown key", remedy)

    def problem(self, key: str | None, what: str, remedy: str) -> None:
        """Report an error at a key of this table (None: at the table itself)."""
        path = self.path if key is None else (*self.path, key)
        self._report(path, f"{dotted(path)}: {what}; {remedy}.")

    def text(self, key: str, default: str | None = None, *, required: bool = False) -> str | None:
        """A text that is not empty; `default` where the key is missing."""
        value = self.values.get(key)
        if value is None:
            if required:
                self.problem(key, "missing", f'add {key} = "…"')
            return default
        if not isinstance(value, str) or not value.strip():
            self.problem(key, f"must be a text that is not empty, got {value!r}", f'write {key} = "…"')
            return default
        return value

    def required(self, key: str) -> str:
        """A text; reported and '' where it is missing."""
        return self.text(key, "", required=True) or ""

    def flag(self, key: str) -> bool:
        """true or false; false where the key is missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, got {value!r}", f"write {key} = true")
            return False
        return value

    def choice(self, key: str, kind: type[Choice], default: Choice) -> Choice:
        """One of the values of `kind`."""
        value = self.values.get(key, default.value)
        try:
            return kind(value)
        except ValueError:
            self.problem(key, f"unknown value {value!r}", f"use one of: {', '.join(kind)}")
            return default

    def seconds(self, key: str, default: float | None) -> float | None:
        """A duration, in seconds."""
        value = self.values.get(key)
        if value is None:
            return default
        seconds = duration(value) if isinstance(value, str) else None
        if seconds is None:
            self.problem(key, f"not a duration: {value!r}", 'write a number and a unit (ms, s, m, h, d), as in "5m"')
            return default
        return seconds

    def tables(self, key: str) -> list[tuple[Any, TomlPath]]:
        """The tables of an array, each with its path."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.problem(key, "must be an array of tables", f"write [[{dotted((*self.path, key))}]]")
            return []
        return [(item, (*self.path, key, number)) for number, item in enumerate(value)]


def duration(text: str) -> float | None:
    """The seconds of a number with a unit; None for another text."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def dotted(path: TomlPath) -> str:
    return ".".join(f"{part}" for part in path) or "file"
