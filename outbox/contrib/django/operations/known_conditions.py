"""All declared conditions by name, and the module that observes the engine of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox import hooks

if TYPE_CHECKING:
    from outbox.broker.operations.conditions import DeclaredCondition
    from outbox.broker.operations.state import BrokerState

_OWN = (
    "outbox.contrib.django.operations.claimed_messages",
    "outbox.contrib.django.operations.findings",
)


def application_conditions() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return the declared conditions of the application's tables, by name."""
    modules = (*_OWN, *hooks.application_conditions)
    return {name: one for module in modules for name, one in import_module(module).CONDITIONS.items()}


def catalogue() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return all declared conditions, by name."""
    from outbox.broker.operations.rules import conditions

    return {**conditions(), **application_conditions()}


def observer() -> Any | None:
    """Return the observing module for the engine of the settings; None for the bundled broker."""
    from outbox.contrib.django.settings.conf import get_settings

    module = hooks.observers.get(get_settings().engine)
    return None if module is None else import_module(module)
