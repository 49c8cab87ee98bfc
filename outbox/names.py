"""The allowed names, sizes and numbers. The functions check them before the broker stores them.

A check returns a plain str, because an f-string shows a member of `class Region(str, Enum)` as "Region.EU", and the
broker stores "eu".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache

from outbox.errors import BodyTooLarge, InvalidName
from outbox.utils.safe_text import shown_value

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_HEADERS = 64
MAX_HEADER_VALUE = 4096
MAX_KEY = 255
MAX_TAG = 127
# The largest integer of PostgreSQL, whose timeouts and `poll` count milliseconds with as many bits.
MAX_INTEGER = 2**31 - 1
MAX_WAIT_SECONDS = 24 * 86400
# For a wait that the database keeps: longer than any retry or rate needs, and far from the end of its times.
MAX_DELAY_SECONDS = 366 * 86400
# For calls at the same time and messages in a call: a worker has room for all of them in a file.
MAX_CALLS = 10_000

_TOPIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,126}")
_HEADER = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,63}")
_TAG = re.compile(r"[^\s|\x00-\x1f]+")


def check_topic(name: str) -> str:
    """Return `name`, or raise InvalidName. Names that begin with `%` are reserved for the broker."""
    return _check_identifier("topic", name)


def check_group(name: str) -> str:
    """Return the name of a consumer or producer group, or raise InvalidName."""
    return _check_identifier("group", name)


def _check_identifier(what: str, name: object) -> str:
    if not isinstance(name, str) or not is_identifier(name):
        raise InvalidName(
            f"{what} name {shown_value(name)} is not allowed: use 1 to 127 letters, digits, '_', '-' or '.', "
            f"beginning with a letter, a digit or '_'."
        )
    return str.__str__(name)


@lru_cache(maxsize=1024)
def is_identifier(name: str) -> bool:
    """Whether `name` can be the name of a topic or group."""
    return _TOPIC.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """Return `tag`, or raise InvalidName. A tag has no white space and no `|`, which separates tags in filters."""
    if not isinstance(tag, str) or (tag and (len(tag) > MAX_TAG or not _TAG.fullmatch(tag) or not is_text(tag))):
        raise InvalidName(
            f"tag {shown_value(tag)} is not allowed: use up to {MAX_TAG} characters without white space or '|'."
        )
    return str.__str__(tag)


def check_key(key: str) -> str:
    """Return `key`, or raise InvalidName."""
    if not isinstance(key, str) or len(key) > MAX_KEY or not is_text(key):
        raise InvalidName(
            f"key {shown_value(key)} is not allowed: use a string of up to {MAX_KEY} characters, str(value) for ids."
        )
    return str.__str__(key)


def check_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return `headers`, or raise InvalidName for the first header that is not allowed."""
    if not isinstance(headers, Mapping):
        raise InvalidName(f"headers must be a mapping of names to strings, got {shown_value(headers)}.")
    if len(headers) > MAX_HEADERS:
        raise InvalidName(f"{len(headers)} headers are too many: a message carries up to {MAX_HEADERS}.")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER.fullmatch(name):
            raise InvalidName(
                f"header name {shown_value(name)} is not allowed: use up to 64 letters, digits, '_' or '-', "
                f"beginning with a letter or '_'."
            )
        if not isinstance(value, str) or len(value) > MAX_HEADER_VALUE or not is_text(value):
            raise InvalidName(
                f"header {name!r} must be a string of up to {MAX_HEADER_VALUE} characters, got {shown_value(value)}."
            )
    return headers


def right_choice(kind: type[StrEnum], value: object) -> str:
    """Return how to write the member that was meant by a value of another class, or all members; '' for a member."""
    if isinstance(value, kind):
        return ""
    meant = [one for one in kind if isinstance(value, str) and one.casefold() == value.replace("-", "_").casefold()]
    return " or ".join(f"{kind.__name__}.{one.name}" for one in meant or kind)


def is_whole(value: object, minimum: int = 1, maximum: int = MAX_INTEGER) -> bool:
    """Whether the value is a whole number from `minimum` to `maximum`."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def is_seconds(value: object, maximum: int = MAX_WAIT_SECONDS) -> bool:
    """Whether the value is a number of seconds from 0 to `maximum`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= maximum


def is_text(value: str) -> bool:
    """Whether PostgreSQL can store the text: it has no NUL and no lone surrogate."""
    try:
        return b"\x00" not in value.encode()
    except UnicodeEncodeError:
        return False


def check_body_size(topic: str, body: bytes) -> bytes:
    """Return `body`, or raise BodyTooLarge."""
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(
            f"the body for topic {topic!r} has {len(body):,} bytes, the limit is {MAX_BODY_BYTES:,}: "
            "let outbox store large bodies outside of the broker (docs/large-bodies.md), or publish a reference to "
            "data of your own."
        )
    return body
