"""Reads the few bodies that Spark's parser refuses. Spark limits depth, names, numbers and texts; RFC 8259 does not.

The code is in Python and slow, so a run uses it only for texts that Spark's parser refuses or may read wrongly. It
reads a text without recursion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

NOT_JSON: Final = "the body is not "
_STRING: Final = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
_TOKEN: Final = re.compile(
    rf'[ \t\n\r]*+(?:(?P<string>{_STRING}")|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)'
    r"|(?P<word>true|false|null)|(?P<mark>[{}\[\],:])|(?P<end>\Z))"
)
_BROKEN_STRING: Final = re.compile(_STRING)
_ESCAPE: Final = re.compile(r"\\(?:u(?P<unit>[0-9a-fA-F]{4})|.)", re.DOTALL)
_BLANK: Final = re.compile(r"[ \t\n\r]*+")
_DECIMAL: Final = re.compile(r"-?[0-9]++\.[0-9]++")

Path = tuple[str, ...]


class _Malformed(Exception):
    """The input is not JSON. The text of this exception names the error."""


def read(text: str, paths: Sequence[Path], *, is_object: bool) -> tuple[str, list[str | None]]:
    """The error in a body ('' if there is none), and the texts of the values at `paths` (None if there is no value).

    With `is_object`, the body must be one JSON object. If the body is not JSON, the error starts with NOT_JSON. Of
    values with one name in an object, the last one counts.
    """
    found: dict[Path, str | None] = {}
    try:
        _read(text, {path[:length] for path in paths for length in range(1, len(path) + 1)}, found, is_object=is_object)
    except _Malformed as problem:
        return f"{NOT_JSON}{problem}", [None] * len(paths)
    for path in paths:
        unit = _lone_surrogate(found.get(path) or "")
        if unit:
            reason = f"{'.'.join(path)} has one half of a surrogate pair, \\u{unit}, which no text of a database has"
            return reason, [None] * len(paths)
    return "", [_plain(found.get(path)) for path in paths]


def _read(text: str, wanted: set[Path], found: dict[Path, str | None], *, is_object: bool) -> None:
    """Read one JSON text, and add the texts of the values at the paths `wanted` to `found`. Raises _Malformed."""
    if text.startswith("\ufeff"):
        raise _Malformed("JSON: it begins with a byte order mark")
    stack: list[str] = []
    # For each open object or array: its path (None if it is not wanted), and its begin.
    places: list[tuple[Path | None, int]] = []
    path: Path | None = ()
    expected, place = "value", 0
    while expected != "nothing":
        token = _TOKEN.match(text, place)
        if token is None:
            raise _Malformed(f"JSON: {_broken(text, place)}")
        kind, value, start = str(token.lastgroup), token[str(token.lastgroup)], token.start(str(token.lastgroup))
        if is_object and not stack and value != "{":
            raise _Malformed("one JSON object")
        depth, is_name = len(stack), kind == "string" and expected in ("name", "name or }")
        after = _step(expected, kind, value, stack)
        if after is None:
            raise _Malformed(f"JSON: {expected} is expected {_at(text, start)}")
        if is_name:
            outer = places[-1][0]
            path = None if outer is None else (*outer, json.loads(value))
            path = path if path in wanted else None
        elif len(stack) > depth:
            _forget(path, found)
            places.append((path, start))
            path = None
        elif len(stack) < depth:
            inner, begin = places.pop()
            if inner:
                found[inner] = text[begin : token.end()]
        elif path and expected == "value" and kind != "mark":
            _forget(path, found)
            found[path] = value
            path = None
        expected, place = after, token.end()
    rest = _BLANK.match(text, place)
    place = place if rest is None else rest.end()
    if place < len(text):
        raise _Malformed(f"one JSON {'object' if is_object else 'text'}: it goes on {_at(text, place)}")


def _forget(path: Path | None, found: dict[Path, str | None]) -> None:
    """Remove the values of an earlier member with the same name."""
    if path:
        for known in [known for known in found if known[: len(path)] == path]:
            del found[known]


def _plain(value: str | None) -> str | None:
    """The text that Spark gives for a value, which is a token or a text of JSON."""
    if value is None or value == "null":
        return None
    if value.startswith('"'):
        return str(json.loads(value))
    return value.rstrip("0").rstrip(".") if _DECIMAL.fullmatch(value) else value


def _step(expected: str, kind: str, value: str, stack: list[str]) -> str | None:
    """The kind of token that is expected after this token; None if this token was not expected."""
    if expected in ("name", "name or }") and kind == "string":
        return "':'"
    if expected == "':'":
        return "value" if value == ":" else None
    if expected in ("value", "value or ]"):
        if value in ("{", "["):
            stack.append(value)
            return "name or }" if value == "{" else "value or ]"
        if kind in ("string", "number", "word"):
            return _after_value(stack)
    if (
        stack
        and value == ("}" if stack[-1] == "{" else "]")
        and expected in ("name or }", "value or ]", "',' or the end")
    ):
        stack.pop()
        return _after_value(stack)
    if expected == "',' or the end" and value == ",":
        return "name" if stack[-1] == "{" else "value"
    return None


def _after_value(stack: list[str]) -> str:
    return "',' or the end" if stack else "nothing"


def _lone_surrogate(string: str) -> str:
    """The first half of a UTF-16 surrogate pair that stands alone in a JSON string; '' if there is none."""
    high, end = "", -1
    for escape in _ESCAPE.finditer(string):
        unit = escape["unit"] or ""
        code = int(unit or "0", 16)
        is_low = 0xDC00 <= code < 0xE000
        if high and (not is_low or escape.start() != end):
            return high
        if is_low and not high:
            return unit
        high, end = (unit if 0xD800 <= code < 0xDC00 else ""), escape.end()
    return high


def _broken(text: str, place: int) -> str:
    blank = _BLANK.match(text, place)
    place = place if blank is None else blank.end()
    broken = _BROKEN_STRING.match(text, place)
    if broken is None:
        return f"no value can begin {_at(text, place)}"
    if broken.end() >= len(text):
        return f"the text that begins at character {place + 1} has no end"
    character = text[broken.end()]
    what = "an unknown escape" if character == "\\" else f"the control character U+{ord(character):04X}"
    return f"a text contains {what}, at character {broken.end() + 1}"


def _at(text: str, place: int) -> str:
    return f"at character {place + 1}" if place < len(text) else "where it ends"
