"""Builds messages from an application's values: any body, any key, a delay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from outbox.contrib.django.engine.broker import get_codecs
from outbox.contrib.django.settings.conf import aware
from outbox.errors import UsageError
from outbox.message import Message


def message(
    topic: str,
    body: Any,
    *,
    key: object = "",
    tag: str = "",
    headers: Mapping[str, str] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | None = None,
) -> Message:
    """An encoded message, to be passed to `publish_messages`. Parameters as in `publish`. Raises UsageError."""
    encoded, content_type = get_codecs().encode(topic, body)
    return Message(
        topic=topic,
        body=encoded,
        content_type=content_type,
        key=key_text(key),
        tag=tag,
        headers=headers or {},
        delay=wait_of(topic, delay, deliver_at),
        deliver_at=aware(deliver_at) if isinstance(deliver_at, datetime) else deliver_at,
    )


def messages_of(given: Iterable[Message], name: str) -> list[Message]:
    """Several messages, as a list. Raises UsageError for anything else; `name` is the calling function."""
    found: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    wrong = [item for item in found if not isinstance(item, Message)]
    if wrong or isinstance(given, Message):
        raise UsageError(
            f"{name}: give a list of what message(…) builds, not {(wrong or [given])[0]!r:.80}. Nothing was published."
        )
    return found


def key_text(key: object) -> str:
    """A key as text; ints and UUIDs are converted."""
    if isinstance(key, (int, UUID)) and not isinstance(key, bool):
        return str(key)
    return cast(str, key)


def wait_of(topic: str, delay: float | timedelta | None, deliver_at: datetime | None) -> timedelta | None:
    """The delay as a timedelta. Raises UsageError for an invalid one, and if `deliver_at` is given too."""
    if delay is None:
        return None
    if deliver_at is not None:
        raise UsageError(f"topic {topic!r}: give delay or deliver_at, not both.")
    if isinstance(delay, bool) or not isinstance(delay, (int, float, timedelta)):
        raise UsageError(f"topic {topic!r}: delay must be seconds or a timedelta, not {delay!r}.")
    try:
        wait = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        datetime.now(UTC) + wait
    except (OverflowError, ValueError) as error:
        raise UsageError(
            f"topic {topic!r}: delay must be seconds from now, up to the year 9999, got {delay!r}."
        ) from error
    if wait < timedelta(0):
        raise UsageError(f"topic {topic!r}: delay must not be negative, got {delay!r}.")
    return wait
