"""Finds the reason why Spark's parser refuses a text: it is not JSON (RFC 8259), or it exceeds a limit of the parser.

The code is in Python and slow, so a run uses it only for the few texts that Spark's parser refuses. The code reads a
text without recursion.
"""

from __future__ import annotations

import re
from typing import Final

# The limits of Spark's JSON parser (Jackson's StreamReadConstraints).
MAX_DEPTH: Final = 1_000
MAX_NUMBER: Final = 1_000
MAX_NAME: Final = 50_000
MAX_STRING: Final = 20_000_000
NOT_JSON: Final = "the body is not "
_STRING: Final = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
_TOKEN: Final = re.compile(
    rf'[ \t\n\r]*+(?:(?P<string>{_STRING}")|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)'
    r"|(?P<word>true|false|null)|(?P<mark>[{}\[\],:])|(?P<end>\Z))"
)
_BROKEN_STRING: Final = re.compile(_STRING)
_ESCAPE: Final = re.compile(r"\\(?:u(?P<unit>[0-9a-fA-F]{4})|.)", re.DOTALL)
_BLANK: Final = re.compile(r"[ \t\n\r]*+")


class _Malformed(Exception):
    """The input is not JSON. The text of this exception names the error."""


def why_refused(text: str, *, is_object: bool) -> str:
    """The error in a body, or the limit of Spark's parser that the body exceeds; '' if Spark can read the body.

    With `is_object`, the body must be one JSON object. If the body is not JSON, the result starts with NOT_JSON.
    """
    try:
        limit = _read(text, is_object=is_object)
    except _Malformed as problem:
        return f"{NOT_JSON}{problem}"
    return f"the body is JSON, but Spark cannot parse it: {limit}" if limit else ""


def _read(text: str, *, is_object: bool) -> str:
    """Read one JSON text, and return the limit of Spark's parser that the text exceeds; '' if it exceeds none. Raises
    _Malformed."""
    if text.startswith("\ufeff"):
        raise _Malformed("JSON: it begins with a byte order mark")
    stack: list[str] = []
    expected, limit, place = "value", "", 0
    while expected != "nothing":
        token = _TOKEN.match(text, place)
        if token is None:
            raise _Malformed(f"JSON: {_broken(text, place)}")
        kind, value = str(token.lastgroup), token[str(token.lastgroup)]
        if is_object and not stack and value != "{":
            raise _Malformed("one JSON object")
        limit = limit or _limit(kind, value, len(stack), is_name=expected in ("name", "name or }"))
        after = _step(expected, kind, value, stack)
        if after is None:
            raise _Malformed(f"JSON: {expected} is expected {_at(text, token.start(kind))}")
        expected, place = after, token.end()
    rest = _BLANK.match(text, place)
    place = place if rest is None else rest.end()
    if place < len(text):
        raise _Malformed(f"one JSON {'object' if is_object else 'text'}: it goes on {_at(text, place)}")
    return limit


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


def _limit(kind: str, value: str, depth: int, *, is_name: bool) -> str:
    if kind == "mark":
        too_deep = value in "{[" and depth >= MAX_DEPTH
        return f"it is nested more than {MAX_DEPTH:,} levels deep" if too_deep else ""
    if kind == "number":
        long = len(value) > MAX_NUMBER
        return f"a number has {len(value):,} characters, of {MAX_NUMBER:,} that it reads" if long else ""
    if kind != "string":
        return ""
    most = MAX_NAME if is_name else MAX_STRING
    if len(value) - 2 > most:
        return f"a {'name' if is_name else 'text'} has {len(value) - 2:,} characters, of {most:,} that it reads"
    unit = _lone_surrogate(value) if "\\u" in value else ""
    return f"a text has one half of a surrogate pair, \\u{unit} (PostgreSQL's jsonb refuses it too)" if unit else ""


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
