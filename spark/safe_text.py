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
# What libpq quotes of a connection string that it cannot read, or reads in another way than it was meant.
_UNREADABLE: Final = re.compile(
    r"((?:missing \"=\" after|URI[^\"]*:|percent-encoded[^\"]*:|connection option|integer value|port number:|"
    r"unexpected character|host name) *)\".*\"",
    re.DOTALL,
)


def mask_passwords(text: str) -> str:
    """`text` with *** for every password in a URL, malformed ones too, or after a name such as `password=`."""
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _URL_WITHOUT_HOST.sub(rf"\1{MASK}", text)
    text = _UNREADABLE.sub(rf'\1"{MASK}"', text)
    return _NAMED.sub(rf"\1{MASK}", text)


def for_people(text: str) -> str:
    r"""A text of several lines, for a terminal: without passwords, and with escapes (`\x1b`) for what steers it."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
        for character in mask_passwords(text)
    )
