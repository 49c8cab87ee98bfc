"""Reads the few bodies that Spark's parser refuses. Spark limits depth, names, numbers and texts; RFC 8259 does not.

The code is in Python and slow, so a run uses it only for texts that Spark's parser refuses or may read wrongly.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

NOT_JSON: Final = "the body is not "
# Python's parser reads the levels of a text by recursion, and refuses deeper ones.
_LEVELS: Final = 3_000
_BLANKS: Final = " \t\n\r"
_DECIMAL: Final = re.compile(r"-?[0-9]+\.[0-9]+")
HALF_PAIR: Final = re.compile("[\ud800-\udfff]")


class _Number(str):
    """The text of a number, which keeps all digits."""


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON: it contains {name}")


_DECODER: Final = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_refuse)


def values_at(
    text: str, paths: Sequence[Sequence[tuple[str, ...]]], *, is_object: bool
) -> tuple[str, list[str | None]]:
    """The error in a body ('' if there is none), and the texts of the values at `paths` (None if there is no value): of
    each group of paths, the first one that has a value counts.

    With `is_object`, the body must be one JSON object. If the body is not JSON, the error starts with NOT_JSON. Of
    values with one name in an object, the last one counts.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _LEVELS))
    try:
        read = document(text, is_object=is_object)
        values = [[_plain(_at(read, path)) for path in names] for names in paths]
        texts = [next((text for text in each if text is not None), None) for each in values]
    except json.JSONDecodeError as error:
        return f"{NOT_JSON}JSON: {error}", [None] * len(paths)
    except RecursionError:
        return f"{NOT_JSON}JSON of at most {_LEVELS:,} levels", [None] * len(paths)
    except ValueError as error:
        return f"{NOT_JSON}{error}", [None] * len(paths)
    finally:
        sys.setrecursionlimit(limit)
    for names, found in zip(paths, texts, strict=True):
        if half := HALF_PAIR.search(found or ""):
            unit = f"\\u{ord(half[0]):04x}"
            reason = f"{'.'.join(names[0])} has one half of a surrogate pair, {unit}, which no text of a database has"
            return reason, [None] * len(paths)
    return "", texts


def document(text: str, *, is_object: bool = False) -> Any:
    """The whole text as one value. Raises ValueError and RecursionError."""
    if text.startswith("\ufeff"):
        raise ValueError("JSON: it begins with a byte order mark")
    start = len(text) - len(text.lstrip(_BLANKS))
    if is_object and not text.startswith("{", start):
        raise ValueError("one JSON object")
    found, end = _DECODER.raw_decode(text, start)
    if rest := text[end:].lstrip(_BLANKS):
        place = len(text) - len(rest) + 1
        raise ValueError(f"one JSON {'object' if is_object else 'text'}: it goes on at character {place}")
    return found


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _plain(value: Any) -> str | None:
    """The text that Spark gives for a value."""
    return value if value is None or type(value) is str else written(value)


def written(value: Any) -> str:
    """The text that Spark gives for a value, and this package for a masked body."""
    if isinstance(value, _Number):
        return value.rstrip("0").rstrip(".") if _DECIMAL.fullmatch(value) else str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(name)}:{written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
