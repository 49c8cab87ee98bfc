"""Reads typed values from TOML tables, and finds the line of each key for the error texts, because tomllib
does not give lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Final, TypeVar

from ..common.options import parse_duration

Path = tuple[str | int, ...]

_TABLE: Final = re.compile(r"^\s*\[(?P<array>\[)?\s*(?P<name>[^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY: Final = re.compile(r"^\s*(?P<key>(?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_MULTILINE: Final = re.compile(r"\"\"\"|'''")
Choice = TypeVar("Choice", bound=StrEnum)


class TomlTable:
    """Reads typed values from one TOML table, and reports each error with the line of its key."""

    def __init__(self, report: Callable[[Path, str], None], values: Any, path: Path, allowed: tuple[str, ...]) -> None:
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
        """Report an error at a key of this table, or at the table itself if `key` is None."""
        path = self.path if key is None else (*self.path, key)
        self._report(path, f"{dotted(path)}: {what}; {remedy}.")

    def text(self, key: str, default: str | None = None, *, required: bool = False) -> str | None:
        """The text of a key, which must not be empty; `default` if the key is missing."""
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
        """The text of a required key. If the key is missing, report an error and return ''."""
        return self.text(key, "", required=True) or ""

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

    def seconds(self, key: str, default: float | None) -> float | None:
        """The duration of a key, in seconds."""
        value = self.values.get(key)
        if value is None:
            return default
        seconds = parse_duration(value) if isinstance(value, str) else None
        if seconds is None:
            self.problem(key, f"not a duration: {value!r}", 'write a number and a unit (ms, s, m, h, d), as in "5m"')
            return default
        return seconds

    def tables(self, key: str) -> list[tuple[Any, Path]]:
        """The tables of an array, each with its path."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.problem(key, "must be an array of tables", f"write [[{dotted((*self.path, key))}]]")
            return []
        return [(item, (*self.path, key, number)) for number, item in enumerate(value)]


def dotted(path: Path) -> str:
    return ".".join(f"{part}" for part in path) or "file"


def lines_by_path(text: str) -> dict[Path, int]:
    """The line number (from 1) of every table and key, by its path. The tables of an array are numbered from 0."""
    found: dict[Path, int] = {(): 1}
    counts: dict[Path, int] = {}
    table: Path = ()
    quoted = False
    for number, line in enumerate(text.splitlines(), start=1):
        was_quoted = quoted
        if len(_MULTILINE.findall(line)) % 2:
            quoted = not quoted
        if was_quoted:
            continue
        header = _TABLE.match(line)
        if header:
            table = _enter(header["name"], bool(header["array"]), counts)
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key["key"])), number)
    return found


def line_of(lines: dict[Path, int], path: Path) -> int:
    """Line of `path`, or of the nearest table around it."""
    while path not in lines:
        path = path[:-1]
    return lines[path]


def _parts(name: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", name)]


def _enter(name: str, is_array: bool, counts: dict[Path, int]) -> Path:
    path: Path = ()
    parts = _parts(name)
    for position, part in enumerate(parts):
        path = (*path, part)
        if is_array and position == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path
