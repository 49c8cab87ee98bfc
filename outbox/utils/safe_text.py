"""Makes texts safe to show: masks passwords and fields, and escapes characters that control a terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

MASK: Final = "***"
# Match up to the last @ of the line: in a malformed URL the password itself may contain any character.
_URL: Final = re.compile(r"(://[^\s:/@]*:)[^\n]*@")
_URL_WITHOUT_HOST: Final = re.compile(r"(://[^\s:/@]*:)(?!\d+(?:[/?\s]|$)|\*)[^\s/@]+")
_NAMED: Final = re.compile(
    r"""(\w*(?:password|passwd|pwd|secret)\w*(?:\s*=|['"]\s*[:=])\s*)
        (?: '(?:[^'\\\n]|\\.)*'? | "(?:[^"\\\n]|\\.)*"? | [^\s&,;)}]+ )""",
    re.IGNORECASE | re.VERBOSE,
)


def mask_passwords(text: str) -> str:
    """`text` with *** for every password in a URL, malformed or not, or after a name such as `password=`."""
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _URL_WITHOUT_HOST.sub(rf"\1{MASK}", text)
    return _NAMED.sub(rf"\1{MASK}", text)


def masked_names(masked: Mapping[str, frozenset[str]], topic: str) -> frozenset[str]:
    """The names of the fields masked on a topic, in lower case; '*' holds those of all topics."""
    return masked.get("*", frozenset()) | masked.get(topic, frozenset())


def masked_value(value: Any, names: Collection[str]) -> Any:
    """A decoded body or headers with *** for each field of these names, at any depth."""
    if isinstance(value, Mapping):
        return {name: MASK if str(name).lower() in names else masked_value(one, names) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_value(one, names) for one in value]
    return value


def masked_text(text: str, values: Collection[Any], names: Collection[str]) -> str:
    """A text about messages with *** for the values of their masked fields.

    `values` are the messages' decoded bodies and headers. A value of fewer than three characters is masked only after
    its field's name, because it could also stand in the middle of a word.
    """
    held = {str(found) for value in values for found in _held(value, names)}
    for one in sorted((one for one in held if len(one) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(one, MASK)
    for name in names:
        text = re.sub(_FIELD.format(re.escape(name)), rf"\1{MASK}", text, flags=re.IGNORECASE)
    return text


def show_as(error: BaseException, text: str) -> None:
    """Make `shown_text` return this text for the error: it is stored and logged in place of the error's own."""
    error.outbox_shown_text = text  # type: ignore[attr-defined]


def shown_text(error: BaseException) -> str:
    """The text of an error as it may be stored and logged."""
    return str(getattr(error, "outbox_shown_text", error))


_SHORTEST: Final = 3
# A field in a JSON text, in the repr() of a dictionary, or as a keyword argument.
_FIELD: Final = r"""(\b{}['"]?\s*[:=]\s*)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,;)}}\]*]+)"""


def _held(value: Any, names: Collection[str], *, below: bool = False) -> Iterator[Any]:
    """The scalars in fields of these names, at any depth; all scalars of `value` if it is `below` such a field."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _held(one, names, below=below or str(name).lower() in names)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _held(one, names, below=below)
    elif below and value is not None and not isinstance(value, bool):
        yield value


def inert(text: str, *, keep: str = "") -> str:
    r"""`text` with escapes (`\x1b`) for unprintable characters, except those in `keep`.

    Keys, tags, headers and errors come from outside. Unescaped, they could clear the screen, rewrite lines above, or
    reverse the direction of the text that follows.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def for_people(text: str) -> str:
    """A text of several lines for a terminal or a log: passwords masked, control characters escaped."""
    return inert(mask_passwords(text), keep="\n")
