"""Refuses to publish and to handle events in a process without the app of the part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox.errors import ConfigurationError
from outbox.events.declaration import expected_events, find_event


def message(value: object, body: object, key: object, tag: str, headers: Mapping[str, str] | None) -> None:
    """Raise ConfigurationError if the value is an event."""
    _refuse(type(value), "Nothing was published. ")


def topic(kind: type) -> None:
    """Raise ConfigurationError if the type is an event."""
    _refuse(kind)


def option(annotation: Any, kind: type | None) -> None:
    """Raise ConfigurationError if a handler expects events."""
    for one in (*expected_events(annotation), kind):
        _refuse(one)


def _refuse(kind: object, done: str = "") -> None:
    if (found := find_event(kind)) is not None:
        raise ConfigurationError(
            f"{found.kind.__qualname__} is the event {found.name!r}, but INSTALLED_APPS lacks 'outbox.contrib.events'. "
            f"{done}Add the app, and run migrate for the broker's database. A program without Django imports "
            "outbox.contrib.events."
        )
