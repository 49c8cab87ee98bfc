"""Where in a TOML file a value was written: tomllib gives values, a validation error needs lines."""

from __future__ import annotations

import re
from typing import Final

Path = tuple[str | int, ...]

_TABLE: Final = re.compile(r"^\s*\[(?P<array>\[)?\s*(?P<name>[^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY: Final = re.compile(r"^\s*(?P<key>(?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_MULTILINE: Final = re.compile(r"\"\"\"|'''")


def lines_by_path(text: str) -> dict[Path, int]:
    """Line number (from 1) of every table and key, by its path; arrays of tables are numbered from 0."""
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
