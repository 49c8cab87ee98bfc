"""All declared conditions by name, and the module that observes the engine of the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from outbox import hooks

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.broker.operations.conditions import Condition, ConditionReport, DeclaredCondition
    from outbox.broker.operations.dead_letters import LetterSelection
    from outbox.broker.operations.state import BrokerState


class Figures(Protocol):
    """The figures of an engine's server."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `outbox_status --json`."""

    def headline(self) -> str:
        """The line with which `outbox_status` begins."""

    def tables(self) -> Iterator[tuple[Sequence[str], Iterable[Sequence[object]]]]:
        """The tables that `outbox_status` prints: headings and rows."""


class Observer(Protocol):
    """The module through which operators see and change the server of an engine that is not in PostgreSQL.

    `CONDITIONS`: its declared conditions, by name. `REPLAY_CAUTION`: what else a replay of dead letters does, as a
    sentence. `OVERVIEW_PAGE`: the template of the overview, which gets the figures as `server`. All functions may raise
    ConfigurationError or BrokerError.
    """

    CONDITIONS: Mapping[str, DeclaredCondition[Any]]
    REPLAY_CAUTION: str
    OVERVIEW_PAGE: str

    def look(self) -> tuple[ConditionReport, Figures | None]:
        """The conditions that hold, and the figures; None if a server does not answer."""

    def probe(self) -> ConditionReport:
        """The few conditions for load balancers."""

    def examine(self) -> Iterable[Condition]:
        """The conditions that hold, and other problems, for `outbox_doctor`."""

    def metric_families(self, figures: Any) -> Iterable[tuple[str, Sequence[tuple[Sequence[str], float]]]]:
        """The figures as metrics: names with rows of labels and value."""

    def refused_command(self, name: str) -> str:
        """Why a command does not work on this engine, and what to use instead; '' if it works."""

    def refused_page(self, name: str) -> str:
        """Why a page does not work on this engine, and what to use instead; '' if it works."""

    def install(self, create: str | None, *, say: Callable[[str], None]) -> None:
        """Compare the topics of the server with the declared topics. The work of `outbox_install`.

        `create`: None, or the address at which topics and groups are created first, or '' for all addresses.
        """

    def now(self) -> datetime:
        """A time at which every dead letter of this moment is older by the server's clock."""

    def settle_letters(self, group: str, selection: LetterSelection, *, limit: int, replay: bool, dry_run: bool) -> int:
        """Replay or discard dead letters, the oldest first, and return their number."""


def application_conditions() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return the conditions that parts declare about the application's tables, by name."""
    return {
        name: one for module in hooks.application_conditions for name, one in import_module(module).CONDITIONS.items()
    }


def catalogue() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return all declared conditions, by name."""
    from outbox.broker.operations.rules import conditions

    return {**conditions(), **application_conditions()}


def observer() -> Observer | None:
    """Return the observing module for the engine of the settings; None for the bundled broker."""
    from outbox.contrib.django.settings.conf import get_settings

    engine = hooks.engines.get(get_settings().engine)
    return None if engine is None else cast("Observer", import_module(engine.observer))
