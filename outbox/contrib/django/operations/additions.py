"""What apps add to the conditions and the periodic passes, when Django loads them.

Web processes add too, so this module imports nothing of the code that evaluates conditions and runs passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.broker.operations.conditions import DeclaredCondition
    from outbox.broker.operations.state import BrokerState

Work = Callable[[], Mapping[str, Any]]

# The modules with the conditions of the application's tables: each has declarations with the name CONDITIONS.
condition_modules: list[str] = []
# Name -> interval in seconds, and work.
passes: dict[str, tuple[float, Work]] = {}
# Name of an engine -> the module that observes its server, if that is not the bundled broker.
observers: dict[str, str] = {}


def add_conditions(module: str) -> None:
    """Show the conditions that a module declares in `CONDITIONS`. The module is imported when they are first read.

    Other apps call this function in their `AppConfig.ready`. The rules get the state of the broker, and may read the
    tables of the application.
    """
    if module not in condition_modules:
        condition_modules.append(module)
        application_conditions.cache_clear()


@cache
def application_conditions() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return the declared conditions of the application's tables, by name."""
    return {name: one for module in condition_modules for name, one in import_module(module).CONDITIONS.items()}


def catalogue() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return all declared conditions, by name."""
    from outbox.broker.operations.rules import CONDITIONS

    return {**CONDITIONS, **application_conditions()}


def add_pass(name: str, interval_seconds: float, work: Work) -> None:
    """Run `work` as a further periodic pass. Other apps call this function in their `AppConfig.ready`.

    If a pass with this name was added before, the new pass replaces it.
    """
    passes[name] = (interval_seconds, work)


def add_observer(engine: str, module: str) -> None:
    """Name the module that observes the server of an engine.

    It has the functions `look() -> (report, figures)`, `probe() -> report`, `examine() -> conditions` (for the doctor)
    and `metric_families(figures)`, and its conditions with the name CONDITIONS.
    """
    observers[engine] = module


def observer() -> Any | None:
    """Return the observing module for the engine of the settings; None for the bundled broker."""
    from outbox.contrib.django.settings.conf import get_settings

    module = observers.get(get_settings().engine)
    return None if module is None else import_module(module)
