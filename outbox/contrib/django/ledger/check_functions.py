"""The look-ups given as `check=`: found again by name when a check-back asks, in whatever process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from django.apps import apps

from outbox.errors import ConfigurationError
from outbox.message import Message

Lookup = Callable[[Message], bool]

_lookups: dict[str, Lookup] = {}


def register_lookup(name: str, lookup: Lookup) -> None:
    """Register the look-up of a checker name ('module:qualname' of the decorated function)."""
    if not callable(lookup):
        raise ConfigurationError(
            f"check= of {name} must be a function of the message that returns True if it committed, not {lookup!r}."
        )
    _lookups[name] = lookup


def find_lookup(name: str) -> Lookup | None:
    """The look-up of a checker name, importing its module if it belongs to an installed app; None if there is none."""
    known = _lookups.get(name)
    if known is not None or not name:
        return known
    module = name.partition(":")[0]
    # The name comes out of a database: only code of this project is imported on its word.
    if apps.get_containing_app_config(module) is None:
        return None
    try:
        import_module(module)
    except ImportError:
        return None
    return _lookups.get(name)
