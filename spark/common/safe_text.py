"""Makes texts safe to show: masks passwords, and escapes characters that control a terminal.

`outbox/utils/safe_text.py` masks passwords in the same way. This module is a copy, because this package imports nothing
of the framework. tests/core/test_safe_text.py checks that both modules give the same results."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MASK: Final = "***"
# The patterns take a time in proportion to the text's length, because the text of an error may be one long word.
_USER: Final = re.compile(r"://[^\s:/@]*:")
_URL_WITHOUT_HOST: Final = re.compile(r"(://[^\s:/@]*:)(?!\d+(?:[/?\s]|$)|\*)[^\s/@]+")
_NAMED: Final = re.compile(
    r"""((?<!\w)(?=\w*(?:password|passwd|pwd|secret))\w++(?:\s*=|['"]\s*[:=])\s*)
        (?: '(?:[^'\\\n]|\\.)*'? | "(?:[^"\\\n]|\\.)*"? | [^\s&,;)}]+ )""",
    re.IGNORECASE | re.VERBOSE,
)
# If libpq cannot parse a connection string, its error text quotes a part of the string. The quoted part may be the
# password.
_UNREADABLE: Final = re.compile(
    r"((?:missing \"=\" after|URI[^\"]*:|percent-encoded[^\"]*:|connection option|integer value|port number:|"
    r"unexpected character|host name) *)\".*\"",
    re.DOTALL,
)


def mask_passwords(text: str) -> str:
    """`text` with *** in place of every password in a URL (malformed or not) or after a name such as `password=`."""
    if "://" in text:
        text = "\n".join(map(_without_password, text.split("\n")))
    text = _URL_WITHOUT_HOST.sub(rf"\1{MASK}", text)
    text = _UNREADABLE.sub(rf'\1"{MASK}"', text)
    return _NAMED.sub(rf"\1{MASK}", text)


def _without_password(line: str) -> str:
    """A line with *** up to its last @: in a malformed URL the password may contain any character."""
    end = line.rfind("@")
    found = _USER.search(line, 0, max(end, 0))
    return line if found is None else f"{line[: found.end()]}{MASK}{line[end:]}"


def for_people(text: str) -> str:
    r"""A text of one or several lines, safe for a terminal: without passwords, and with escapes (`\x1b`) for control
    characters."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
        for character in mask_passwords(text)
    )


# If two long texts differ, this number of characters is shown before and after the first difference.
_AROUND: Final = 100


def quoted(text: str) -> str:
    r"""A value in quotes, so that its ends are visible, with escapes (`\u00a0`) for invisible characters."""
    return f"'{''.join(_visible(character) for character in text)}'"


def visible(text: str) -> str:
    """The unchanged key, or the `quoted` key if it has invisible characters, begins or ends with a blank, is empty, or
    is the text "null"."""
    shown = quoted(text)
    is_seen = shown.replace("\\\\", "\\") == f"'{text}'" and text.strip() == text
    return text if is_seen and text not in ("", "null") else shown


def escaped(text: str) -> str:
    r"""A text of several lines with escapes (`\u00a0`) for invisible characters. In a JSON text, such an escape has the
    meaning of the character."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _escape(each) for each in text)


def _visible(character: str) -> str:
    if character == "\\":
        return "\\\\"
    return character if character.isprintable() and not unicodedata.combining(character) else _escape(character)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown_difference(ours: str | None, theirs: str | None) -> tuple[str, str, str]:
    """Three texts about two values that differ: each value, cut near the first difference, and a note.

    The note says why the difference is hard to see, and where it begins in a long text. The note may be empty.
    """
    if ours is None or theirs is None:
        return *(("null" if text is None else _cut(text, 0)) for text in (ours, theirs)), ""  # type: ignore[return-value]
    begin = next((n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    begin = min(len(ours), len(theirs)) if begin is None else begin
    if unicodedata.normalize("NFC", ours) == unicodedata.normalize("NFC", theirs):
        note = "they differ in Unicode normalisation"
    elif unicodedata.normalize("NFKC", ours) == unicodedata.normalize("NFKC", theirs) or _look_alike(ours, theirs):
        note = "they look alike"
    elif " ".join(ours.split()) == " ".join(theirs.split()):
        note = "they differ in spaces"
    else:
        note = ""
    escaped = note not in ("", "they differ in spaces")
    shown = (_cut(text, begin, is_escaped=escaped) for text in (ours, theirs))
    place = f"from character {begin + 1} on" if max(len(ours), len(theirs)) > 2 * _AROUND else ""
    return *shown, "; ".join(part for part in (note, place) if part)  # type: ignore[return-value]


def _cut(text: str, begin: int, *, is_escaped: bool = False) -> str:
    first = max(0, begin - _AROUND) if len(text) > 2 * _AROUND else 0
    part = text[first : first + 2 * _AROUND]
    shown = quoted(part)
    if is_escaped:
        shown = "".join(character if character.isascii() else _escape(character) for character in shown)
    before, after = "…" if first else "", "…" if first + len(part) < len(text) else ""
    return f"{before}{shown}{after}"


def _look_alike(ours: str, theirs: str) -> bool:
    """Whether the texts differ in letters of different scripts that look alike, as a Cyrillic а and a Latin a."""
    differing = [(one, other) for one, other in zip(ours, theirs, strict=False) if one != other]
    return len(ours) == len(theirs) and all(
        one.isalpha() and other.isalpha() and _script(one) != _script(other) for one, other in differing
    )


def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0]
