"""The functions given as `check=`: check-back finds these functions by name in any process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from django.apps import apps

from outbox.errors import ConfigurationError
from outbox.message import Message

Lookup = Callable[[Message], bool]

_lookups: dict[str, Lookup] = {}


def register_lookup(name: str, lookup: Lookup) -> None:
    """Register the function given as `check=` under a checker name ('module:qualname' of the decorated function)."""
    if not callable(lookup):
        raise ConfigurationError(
            f"check= of {name} must be a function: it gets the message and returns True if the transaction committed. "
            f"It is {lookup!r}."
        )
    _lookups[name] = lookup


def find_lookup(name: str) -> Lookup | None:
    """The `check=` function that is registered under a checker name; None if there is none.

    If the module in the checker name belongs to an installed app, this module is imported first.
    """
    known = _lookups.get(name)
    if known is not None or not name:
        return known
    module = name.partition(":")[0]
    # The name comes from a database, so only modules of this project are imported.
    if apps.get_containing_app_config(module) is None:
        return None
    try:
        import_module(module)
    except ImportError:
        return None
    return _lookups.get(name)
