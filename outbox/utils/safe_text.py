"""Makes texts safe to show: masks passwords and fields, and escapes characters that control a terminal."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

MASK: Final = "***"
# The patterns take a time in proportion to the text's length, because the text of an error may be one long word.
_USER: Final = re.compile(r"://[^\s:/@]*:")
_URL_WITHOUT_HOST: Final = re.compile(r"(://[^\s:/@]*:)(?!\d+(?:[/?\s]|$)|\*)[^\s/@]+")
_NAMED: Final = re.compile(
    r"""((?<!\w)(?=\w*(?:password|passwd|pwd|secret))\w++(?:\s*=|['"]\s*[:=])\s*)
        (?: '(?:[^'\\\n]|\\.)*'? | "(?:[^"\\\n]|\\.)*"? | [^\s&,;)}]+ )""",
    re.IGNORECASE | re.VERBOSE,
)


def mask_passwords(text: str) -> str:
    """Return `text` with *** in place of each password. A password is in a URL, or after a name such as `password=`."""
    if "://" in text:
        text = "\n".join(map(_without_password, text.split("\n")))
    text = _URL_WITHOUT_HOST.sub(rf"\1{MASK}", text)
    return _NAMED.sub(rf"\1{MASK}", text)


def _without_password(line: str) -> str:
    """Return a line with *** up to its last @: in a malformed URL the password may contain any character."""
    end = line.rfind("@")
    found = _USER.search(line, 0, max(end, 0))
    return line if found is None else f"{line[: found.end()]}{MASK}{line[end:]}"


def masked_names(masked: Mapping[str, frozenset[str]], topic: str) -> frozenset[str]:
    """Return the names of the fields that are masked on a topic, in lower case. The entry '*' applies to all topics."""
    return masked.get("*", frozenset()) | masked.get(topic, frozenset())


def masked_value(value: Any, names: Collection[str]) -> Any:
    """Return a decoded body or headers with *** in place of each field with one of these names, at any depth."""
    if isinstance(value, Mapping):
        return {name: MASK if str(name).lower() in names else masked_value(one, names) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_value(one, names) for one in value]
    return value


def masked_text(text: str, values: Collection[Any], names: Collection[str]) -> str:
    """Return a text about messages with *** in place of the values of their masked fields.

    `values` are the decoded bodies and headers of the messages. A value of fewer than three characters may also be part
    of a word in the text. So such a short value is masked only after the name of its field.
    """
    held = {str(found) for value in values for found in _held(value, names)}
    for one in sorted((one for one in held if len(one) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(one, MASK)
    for name in names:
        text = re.sub(_FIELD.format(re.escape(name)), rf"\1{MASK}", text, flags=re.IGNORECASE)
    return text


# -- errors of other code ------------------------------------------------------------------------------
#
# An error of a handler, a codec or a receiver is a value from outside. Its `__str__` may raise, return 100 MB or
# query a database. Its attributes may be properties that raise, and so may those of its causes. The functions below
# raise nothing, and what they return is bounded.

LONGEST_TEXT: Final = 4000
# A log record of a longer traceback would be a burden for every program that reads the log.
_LONGEST_TRACEBACK: Final = 200_000
# Read past properties and metaclasses that define these names again.
class_name_of: Final[Callable[[type], str]] = type.__dict__["__name__"].__get__
traceback_of: Final[Callable[[BaseException], TracebackType | None]] = BaseException.__dict__["__traceback__"].__get__
_KEPT: Final = "outbox_shown_text"


class UnprintableError(Exception):
    """Stands for an error in a log record, because Python cannot print the error itself or its causes."""


def storable(text: str) -> str:
    """Return `text` without the characters that PostgreSQL cannot store: NUL and halves of surrogate pairs."""
    return text.encode(errors="replace").decode().replace("\x00", "\N{REPLACEMENT CHARACTER}")


def show_as(error: BaseException, text: str) -> None:
    """Set `text` as the result of `shown_text` for this error.

    So `text` is stored and logged in place of the error's own text.
    """
    # An error without a dictionary, or with a data descriptor of this name, is asked for its text each time.
    with contextlib.suppress(Exception):
        object.__setattr__(error, _KEPT, text)


def shown_text(error: BaseException) -> str:
    """Return the text of an error that may be stored and logged: bounded, storable, without space at its ends."""
    with contextlib.suppress(Exception):
        kept = object.__getattribute__(error, _KEPT)
        if type(kept) is str:
            return kept
    try:
        # `str` may return an instance of a subclass, whose methods may raise.
        text = str.__getitem__(str(error), slice(LONGEST_TEXT + 1))
    except KeyboardInterrupt:
        # The user's Ctrl-C, whatever runs in that moment.
        raise
    except BaseException as further:
        return f"(its text is unknown, because its __str__ raised {class_name(further)})"
    return storable(text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…").strip()


def class_name(error: BaseException) -> str:
    return class_name_of(type(error))[:200]


def class_path(value: object) -> str:
    kind = type(value)
    try:
        return str(f"{kind.__module__}.{kind.__qualname__}")[:500]
    except Exception:
        return class_name_of(kind)[:500]


def error_line(error: BaseException) -> str:
    """Return the class and the text of an error, as `ValueError: no such order`."""
    return f"{class_name(error)}: {shown_text(error)}"


def shown_value(value: object) -> str:
    """Return the repr() of a value from outside, for an error text: at most 80 characters, also if the repr() fails."""
    try:
        return storable(str.__getitem__(repr(value), slice(80)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<{class_name_of(type(value))[:80]}, whose __repr__ raised {class_name(error)}>"


def frames_of(error: BaseException) -> traceback.StackSummary:
    """Return the frames of an error's traceback, without its causes."""
    try:
        return traceback.extract_tb(traceback_of(error))
    except Exception:
        # The loader of a module may fail to return its source.
        return traceback.StackSummary()


def printable(error: BaseException) -> BaseException:
    """Return the error for `exc_info=` of a log record, or a stand-in if Python cannot print the error."""
    try:
        # Programs that read records also use these two, as the exporters of traces do.
        f"{error} {error!r}"
        printed = "".join(traceback.TracebackException.from_exception(error).format())
        # A handler that writes to a file would lose a record with half a surrogate pair.
        if len(printed.encode()) <= _LONGEST_TRACEBACK:
            return error
    except KeyboardInterrupt:
        raise
    except BaseException:
        pass
    return UnprintableError(error_line(error)).with_traceback(traceback_of(error))


_SHORTEST: Final = 3
# Matches a field in a JSON text, in the repr() of a dictionary, or as a keyword argument.
_FIELD: Final = r"""(\b{}['"]?\s*[:=]\s*)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,;)}}\]*]+)"""


def _held(value: Any, names: Collection[str], *, below: bool = False) -> Iterator[Any]:
    """Yield the scalars in fields with these names, at any depth. If `below` is True, yield all scalars of `value`."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _held(one, names, below=below or str(name).lower() in names)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _held(one, names, below=below)
    elif below and value is not None and not isinstance(value, bool):
        yield value


def inert(text: str, *, keep: str = "") -> str:
    r"""Return `text` with escapes (`\x1b`) for unprintable characters. Characters in `keep` are not escaped.

    Other programs choose the texts of keys, tags, headers and errors. Without escapes, a character could clear the
    screen, overwrite lines above, or reverse the direction of the text after it.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def for_people(text: str) -> str:
    """Return a text of several lines for a terminal or a log, with masked passwords and escaped control characters."""
    return inert(mask_passwords(text), keep="\n")
