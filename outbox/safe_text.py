"""What may be shown: texts without passwords, and without characters that steer a terminal."""

from __future__ import annotations

import re
from typing import Final

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
