"""What may be shown: texts without passwords and masked fields, and without characters that steer a terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

MASK: Final = "***"
# Up to the last @ of the line: in a malformed URL the password may itself hold any character.
_URL: Final = re.compile(r"(://[^\s:/@]*:)[^\n]*@")
_URL_WITHOUT_HOST: Final = re.compile(r"(://[^\s:/@]*:)(?!\d+(?:[/?\s]|$)|\*)[^\s/@]+")
_NAMED: Final = re.compile(
    r"""(\w*(?:password|passwd|pwd|secret)\w*(?:\s*=|['"]\s*[:=])\s*)
        (?: '(?:[^'\\\n]|\\.)*'? | "(?:[^"\\\n]|\\.)*"? | [^\s&,;)}]+ )""",
    re.IGNORECASE | re.VERBOSE,
)


def mask_passwords(text: str) -> str:
    """`text` with *** for every password in a URL, malformed ones too, or after a name such as `password=`."""
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _URL_WITHOUT_HOST.sub(rf"\1{MASK}", text)
    return _NAMED.sub(rf"\1{MASK}", text)


def masked_names(masked: Mapping[str, frozenset[str]], topic: str) -> frozenset[str]:
    """The names of the fields that are masked on a topic, in lower case; '*' names those of all topics."""
    return masked.get("*", frozenset()) | masked.get(topic, frozenset())


def masked_value(value: Any, names: Collection[str]) -> Any:
    """A decoded body or headers with *** for each field of these names, at any depth."""
    if isinstance(value, Mapping):
        return {name: MASK if str(name).lower() in names else masked_value(one, names) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_value(one, names) for one in value]
    return value


def masked_text(text: str, values: Collection[Any], names: Collection[str]) -> str:
    """A text about messages with *** for what their masked fields hold.

    `values` are the messages' decoded bodies and headers. A value of fewer than three characters is masked only behind
    the name of its field: it would be found in the middle of words, too.
    """
    held = {str(found) for value in values for found in _held(value, names)}
    for one in sorted((one for one in held if len(one) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(one, MASK)
    for name in names:
        text = re.sub(_FIELD.format(re.escape(name)), rf"\1{MASK}", text, flags=re.IGNORECASE)
    return text


def show_as(error: BaseException, text: str) -> None:
    """From now on `shown_text` gives this text for the error: what is stored and logged of it."""
    error.outbox_shown_text = text  # type: ignore[attr-defined]


def shown_text(error: BaseException) -> str:
    """The text of an error as it may be stored and logged."""
    return str(getattr(error, "outbox_shown_text", error))


_SHORTEST: Final = 3
# A field in a JSON text, in the repr() of a dictionary, or as a keyword argument.
_FIELD: Final = r"""(\b{}['"]?\s*[:=]\s*)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,;)}}\]*]+)"""


def _held(value: Any, names: Collection[str], *, below: bool = False) -> Iterator[Any]:
    """The scalars that fields of these names hold, at any depth; all of `value` if it is `below` such a field."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _held(one, names, below=below or str(name).lower() in names)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _held(one, names, below=below)
    elif below and value is not None and not isinstance(value, bool):
        yield value


def inert(text: str, *, keep: str = "") -> str:
    r"""`text` with escapes (`\x1b`) for what is no printable character, `keep` excepted.

    Keys, tags, headers and errors come from outside: shown as they are they could clear the screen, rewrite lines
    above, or turn the direction of what follows.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def for_people(text: str) -> str:
    """A text of several lines, for a terminal or a log: without passwords, inert."""
    return inert(mask_passwords(text), keep="\n")
