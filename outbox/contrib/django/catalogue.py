"""All actions and listings by their names, of the core and of the parts.

The name of an action is in its address, on its button and in the audit; the name of a listing is that of its page. See
decision 197.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Final, TypeVar

from outbox import hooks
from outbox.contrib.django import actions
from outbox.contrib.django.actions.declaration import Button, DeclaredAction
from outbox.contrib.django.actions.listing import Listing
from outbox.contrib.django.settings.conf import EngineName, get_settings
from outbox.errors import ConfigurationError

_Declared = TypeVar("_Declared", DeclaredAction, Listing)

# Each module of the folder declares actions and listings. Parts add theirs (`hooks.add_actions`).
_MODULES: Final = (*(f"{actions.__name__}.{one.name}" for one in iter_modules(actions.__path__)), *hooks.actions)
_DECLARED: Final = [one for module in map(import_module, _MODULES) for one in vars(module).values()]


def by_name(declared: Iterable[_Declared]) -> dict[str, _Declared]:
    """Return actions or listings by their names. Raises ConfigurationError if two have one name."""
    found: dict[str, _Declared] = {}
    for one in declared:
        # A module may import a declaration of another one.
        if found.setdefault(one.name, one) is not one:
            raise ConfigurationError(
                f"{found[one.name].command!r} and {one.command!r} are both declared with the name {one.name!r}: one of "
                "them would not exist. Give one another name."
            )
    return found


ACTIONS: Final[Mapping[str, DeclaredAction]] = by_name(one for one in _DECLARED if isinstance(one, DeclaredAction))
# Other engines have listings of the same names.
_EVERY: Final = [one for one in _DECLARED if isinstance(one, Listing)]
LISTINGS: Final[Mapping[str, Listing]] = by_name(one for one in _EVERY if one.engine == EngineName.POSTGRES)


def buttons(place: str, subject: object = None) -> Iterator[Button | str]:
    """The buttons that actions declare for a place, for a row or a page, and the texts in the place of buttons."""
    for name, one in ACTIONS.items():
        for found in one.buttons[place](subject) if place in one.buttons else ():
            yield replace(found, action=name) if isinstance(found, Button) else found


def has_buttons(place: str) -> bool:
    return any(place in one.buttons for one in ACTIONS.values())


def of_command(command: str) -> tuple[DeclaredAction, ...]:
    return tuple(action for action in ACTIONS.values() if action.command.split()[0] == command)


def listings_of(command: str) -> Mapping[str, Listing]:
    """The listings of a command, such as `outbox_group`, by their subcommands."""
    named = ((one.command.partition(" "), one) for one in LISTINGS.values())
    return {word: one for (name, _, word), one in named if name == command}


def on_engine(listing: Listing) -> Listing:
    """The listing of the same name that reads the engine of the settings."""
    try:
        engine = get_settings().engine
    except ConfigurationError:
        # The reader of the listing reports wrong settings.
        return listing
    return next((one for one in _EVERY if (one.name, one.engine) == (listing.name, engine)), listing)
