"""Messages whose types parts declare: topic, body, key, tag and headers come from the declaration of the type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from outbox import hooks
from outbox.errors import ConfigurationError, UsageError
from outbox.subscription import SubscriptionOption
from outbox.utils.safe_text import shown_value

# The default value of an argument that the caller did not pass. None is not used, because None is a valid body.
NOT_GIVEN: Final[Any] = object()

# `publish` calls such a function for every message of a declared type.
_function: Final = cache(hooks.resolved)


def typed_message(
    value: object, body: object, key: object, tag: str, headers: Mapping[str, str] | None
) -> tuple[str, Any, object, str, Mapping[str, str] | None]:
    """Return the topic, body, key, tag and headers of the message of a value. Raises UsageError."""
    for types in hooks.message_types.values():
        found = _function(types.message)(value, body, key, tag, headers)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise UsageError(
        f"publish: {shown_value(value)} is neither the name of a topic nor a value of a declared type. Nothing was "
        f"published. Pass a topic and a body{_advice()}."
    )


def topic_of(topic: str | type, where: str) -> str:
    """Return a topic's name, given as a name or as a declared type. Raises ConfigurationError."""
    if isinstance(topic, str):
        return topic
    for types in hooks.message_types.values():
        found = _function(types.topic)(topic)
        if found is not None:
            return str(found)
    raise ConfigurationError(
        f"{where}: {topic!r} is neither the name of a topic nor a declared type: pass a name{_advice()}."
    )


def reading_options(annotation: Any, kind: type | None) -> Iterator[SubscriptionOption]:
    """Yield the option that makes the bodies for a handler.

    `annotation`: that of the handler's parameter, or None. `kind`: the type that was passed instead of a topic, or
    None. Raises ConfigurationError.
    """
    for types in hooks.message_types.values():
        found = _function(types.option)(annotation, kind)
        if found is not None:
            yield found


def _advice() -> str:
    return "".join(f", or {types.advice}" for types in hooks.message_types.values())
