"""What the core asks about typed events: the message, topic and option of a type.

See decision 251.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from outbox import names
from outbox.declared_types import NOT_GIVEN
from outbox.errors import ConfigurationError, UsageError
from outbox.events.declaration import expected_events, find_event, read_event
from outbox.subscription import SubscriptionOption


class Events(SubscriptionOption):
    """The types of events that the handler of a subscription gets. Raises ConfigurationError for another type.

    Only a handler without the annotation `Delivery[OrderPaid]` needs it: `options=[Events(OrderPaid, OrderLost)]`.
    """

    __slots__ = ("kinds",)
    reads: ClassVar[bool] = True

    def __init__(self, *kinds: type) -> None:
        for kind in kinds:
            if find_event(kind) is None:
                raise ConfigurationError(f"Events({kind!r}): write @event(…) above this class.")
        self.kinds = kinds

    def read(self, topic: str, headers: Mapping[str, str], body: Any) -> Any:
        """Return the event of a message. Raises UnknownEventVersion or UndecodableBody."""
        return read_event(self.kinds, topic, headers, body)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Events) and other.kinds == self.kinds

    def __hash__(self) -> int:
        return hash(self.kinds)

    def __repr__(self) -> str:
        return f"Events({', '.join(kind.__qualname__ for kind in self.kinds)})"


def topic_of(kind: type) -> str | None:
    """Return the topic of a type of events; None if the type is not an event."""
    found = find_event(kind)
    return None if found is None else found.topic


def option_of(annotation: Any, kind: type | None) -> Events | None:
    """Return the option of a handler that expects events: by its annotation, or else by the type that names its topic.

    Raises ConfigurationError.
    """
    kinds = expected_events(annotation) or (() if kind is None else (kind,))
    return Events(*kinds) if kinds else None


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
