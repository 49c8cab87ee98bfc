"""The message of a typed event: topic, body, key, tag and headers come from the declaration of its type.

See decision 251.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox import names
from outbox.declared_types import NOT_GIVEN
from outbox.errors import UsageError
from outbox.events.declaration import find_event


def event_message(
    value: object, body: object, key: object, tag: str, headers: Mapping[str, str] | None
) -> tuple[str, Any, object, str, dict[str, str]] | None:
    """Return the topic, body, key, tag and headers of the message of an event; None for another value.

    Raises UsageError.
    """
    declared = find_event(type(value))
    if declared is None:
        return None
    if body is not NOT_GIVEN:
        raise UsageError(
            f"publish: the event {declared.name!r} was passed together with a body. Nothing was published. Pass the "
            "event alone: its type has the topic."
        )
    if headers is not None:
        names.check_headers(headers)
    if headers and (taken := sorted(set(headers) & set(declared.headers))):
        raise UsageError(
            f"event {declared.name!r}: the headers {', '.join(taken)} come from the type of the event. Nothing was "
            "published. Give your headers other names."
        )
    return (
        declared.topic,
        declared.body_of(value),
        key if not isinstance(key, str) or key else declared.key_of(value),
        tag or declared.tag_of(value),
        {**(headers or {}), **declared.headers},
    )
