"""Shows a message's content without the fields that OUTBOX['MASKED_FIELDS'] names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from outbox.broker.operations.search import Content
from outbox.erasure import ENCRYPTED_CONTENT_TYPE, ERASED_CONTENT_TYPE
from outbox.large_bodies import LARGE_CONTENT_TYPE, Reference
from outbox.utils.safe_text import inert, masked_names, masked_value

SHOWN: Final = 64 * 1024
_UNREADABLE: Final = 4 * 1024


@dataclass(frozen=True, slots=True)
class ShownContent:
    """The content of a message as a page shows it.

    `note` says which part of the body is missing or changed, and why.
    """

    content_type: str
    size: int
    body: str
    headers: str
    note: str


def shown(content: Content, masked: Mapping[str, frozenset[str]]) -> ShownContent:
    """The body and headers of a message as text: escaped, without masked fields, and short enough for a page."""
    names = masked_names(masked, content.topic)
    size, content_type = content.size, content.content_type
    body, note = _body(content, names)
    if content.content_type == LARGE_CONTENT_TYPE and (stored := _reference(content)) is not None:
        size, content_type = stored.size, stored.content_type
    if len(body) > SHOWN:
        body, note = body[:SHOWN], f"Only the first {SHOWN:,} characters are shown. {note}".strip()
    headers = json.dumps(masked_value(content.headers, names), indent=2, ensure_ascii=False) if content.headers else ""
    return ShownContent(content_type, size, _harmless(body), _harmless(headers), note)


def _body(content: Content, names: Collection[str]) -> tuple[str, str]:
    if content.content_type == ERASED_CONTENT_TYPE:
        return "", "The body was erased."
    if content.content_type == ENCRYPTED_CONTENT_TYPE:
        return "", "The body is encrypted for a subject, and this page does not decrypt it."
    if content.content_type == LARGE_CONTENT_TYPE:
        stored = _reference(content)
        name = "an object" if stored is None else f"the object {stored.name}"
        return "", f"The body is {name} in the storage of large bodies. This page does not read it."
    try:
        text = content.body.decode()
    except UnicodeDecodeError:
        if names:
            return "", "The body is not shown: it is not JSON, so its masked fields cannot be found."
        return content.body[:_UNREADABLE].hex(" "), f"Not UTF-8 text: its first {_UNREADABLE:,} bytes in hexadecimal."
    try:
        found = json.loads(text)
        masked = masked_value(found, names)
        note = "Fields named in OUTBOX['MASKED_FIELDS'] are masked." if masked != found else ""
        return json.dumps(masked, indent=2, ensure_ascii=False), note
    except (ValueError, RecursionError):
        if names:
            return "", "The body is not shown: it is not JSON, so its masked fields cannot be found."
        return text, ""


def _reference(content: Content) -> Reference | None:
    try:
        return Reference.parsed(content.body)
    except ValueError:
        return None


def _harmless(text: str) -> str:
    return inert(text, keep="\n\t")
