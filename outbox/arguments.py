"""The arguments of `publish` as the fields of a message: keys, delays and time limits.

    Message(topic=topic, body=body, key=key_text(7), delay=wait_of(topic, 30, None))

What an application passes here may be anything, so a wrong value is a UsageError that says what to pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import UUID

from outbox.errors import InvalidMessage, UsageError
from outbox.time_limit import TIMEOUT_HEADER, timeout_text
from outbox.utils.safe_text import shown_text, shown_value


def key_text(key: object) -> str:
    """Return the key as text; ints and UUIDs are converted."""
    if isinstance(key, (int, UUID)) and not isinstance(key, bool):
        return str(key)
    return cast(str, key)


def wait_of(topic: str, delay: float | timedelta | None, deliver_at: datetime | None) -> timedelta | None:
    """Return the delay as a timedelta.

    Raises UsageError for an invalid delay, or if the caller also passed `deliver_at`.
    """
    if delay is None:
        return None
    if deliver_at is not None:
        raise UsageError(f"topic {topic!r}: pass delay or deliver_at, not both.")
    if isinstance(delay, bool) or not isinstance(delay, (int, float, timedelta)):
        raise UsageError(f"topic {topic!r}: delay must be seconds (a number) or a timedelta, not {shown_value(delay)}.")
    try:
        wait = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        datetime.now(UTC) + wait
    except (OverflowError, ValueError) as error:
        raise UsageError(
            f"topic {topic!r}: delay must be seconds from now that end before the year 10000, got {shown_value(delay)}."
        ) from error
    if wait < timedelta(0):
        raise UsageError(f"topic {topic!r}: delay must not be negative, got {shown_value(delay)}.")
    return wait


def with_timeout(topic: str, headers: Mapping[str, str] | None, timeout: float | timedelta) -> dict[str, str]:
    """Return the headers with the time limit of the message.

    Raises UsageError for an invalid limit, or if the headers already have a limit.
    """
    if headers is not None and not isinstance(headers, Mapping):
        raise UsageError(f"topic {topic!r}: headers must be a mapping of names to strings, got {shown_value(headers)}.")
    if headers and TIMEOUT_HEADER in headers:
        raise UsageError(f"topic {topic!r}: pass timeout or the header {TIMEOUT_HEADER!r}, not both.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise UsageError(
            f"topic {topic!r}: timeout must be seconds (a number) or a timedelta, not {shown_value(timeout)}."
        )
    try:
        text = timeout_text(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))
    except (OverflowError, ValueError) as error:
        raise UsageError(
            f"topic {topic!r}: timeout must be longer than 0 and at most 999,999,999 seconds, got "
            f"{shown_value(timeout)}. To publish a message without a time limit, leave timeout out."
        ) from error
    return {**(headers or {}), TIMEOUT_HEADER: text}


def unreadable(topic: str, error: Exception) -> InvalidMessage:
    """Return the error for a message one of whose values raised `error` when its text or its time was read."""
    return InvalidMessage(
        f"topic {topic!r}: a value of the message raised {type(error).__name__}: {shown_text(error):.200}. Nothing was "
        "published. Pass a plain text, number, date or UUID as key, tag, header, delay and delivery time."
    )
