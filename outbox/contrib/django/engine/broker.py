"""The engine that the settings choose for this process, and its broker. Each object is built when it is first used."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from outbox import hooks
from outbox.broker.database.server_identity import ServerIdentity
from outbox.codec import Codecs
from outbox.contrib.django.database.aliases import place_named_by
from outbox.contrib.django.database.in_tests import makes_or_drops_databases, refuse_in_tests
from outbox.contrib.django.engine.body_steps import body_steps
from outbox.contrib.django.engine.engine import Engine
from outbox.contrib.django.settings.conf import EngineName, OutboxSettings, get_settings
from outbox.ports import Broker

if TYPE_CHECKING:
    from outbox.memory import InMemoryBroker

# Dotted paths, because a process needs the memory for one engine only.
_ENGINES: Final[Mapping[str, str]] = {
    EngineName.POSTGRES: "outbox.contrib.django.engine.postgres.PostgresEngine",
    EngineName.MEMORY: "outbox.contrib.django.engine.memory.MemoryEngine",
}
_FLUSH_SECONDS: Final = 2.0


class CurrentEngine:
    """The engine, the broker and the caches that belong to one settings object and one database."""

    def __init__(self, settings: OutboxSettings) -> None:
        self.settings = settings
        self.has_database = settings.has_database
        self.place = _place(settings)
        self.engine = engine_of(settings)
        self.codecs = self.engine.codecs
        self.catalog = self.engine.catalog
        self.broker = self.engine.broker
        self.body_steps = body_steps()
        # The paths (atomic or two-phase) that this process uses, as the module `path` has chosen them. The keys are the
        # targets of aliases. A value is the server on which the atomic path was proven, or None if messages take the
        # two-phase path.
        self.paths: dict[tuple[object, ...], ServerIdentity | None] = {}
        # For each alias: the last time (time.monotonic) at which this process recorded that the alias does not lead to
        # the broker.
        self.path_reports: dict[str, float] = {}

    def broker_to_use(self) -> Broker:
        """The broker. Raises ConfigurationError if the running test must not use its database."""
        if self.has_database:
            refuse_in_tests(self.settings.broker)
        return self.broker

    def broker_at_commit(self) -> Broker:
        """The broker for a message that this object has published: its own broker, unless the settings have changed."""
        return self.broker if self is _current else get_broker()

    def place_of(self, alias: str) -> tuple[object, ...]:
        """The key of an alias in `paths`."""
        return self.place if self.has_database and alias == self.settings.broker else place_named_by(alias)


def _place(settings: OutboxSettings) -> tuple[object, ...]:
    return place_named_by(settings.broker) if settings.has_database else ()


_current: CurrentEngine | None = None
_lock = threading.Lock()


def engine_of(settings: OutboxSettings) -> Engine:
    """A new engine for these settings, separate from the engine of this process. Checks and commands use it."""
    path = _ENGINES.get(settings.engine) or hooks.engines[settings.engine].kind
    engine: Engine = import_string(path)(settings)
    return engine


def current_engine() -> CurrentEngine:
    """The engine of this process with its caches; the same object until the settings change.

    A publish call reads this object once, because each reading compares the settings and the database of the broker's
    alias. Raises ConfigurationError.
    """
    global _current
    settings = get_settings()
    current = _current
    # The alias may lead to another database than before, as in a test run.
    if (
        current is not None
        and current.settings is settings
        and (not current.has_database or place_named_by(settings.broker) == current.place)
    ):
        return current
    with _lock:
        if _current is None or _current.settings is not settings or _current.place != _place(settings):
            if _current is not None:
                _current.broker.close()
            _current = CurrentEngine(settings)
        return _current


def get_engine() -> Engine:
    """The engine of this process; the same object until the settings change. Raises ConfigurationError."""
    return current_engine().engine


def get_broker() -> Broker:
    """The broker of this process; the same object until the settings change. Raises ConfigurationError."""
    return current_engine().broker_to_use()


def get_codecs() -> Codecs:
    """The default codec of this project, and the codecs of its topics."""
    return current_engine().codecs


def flush(*, within_seconds: float = _FLUSH_SECONDS) -> bool:
    """Wait until this process has sent or given up its decisions.

    Returns False if this takes longer than `within_seconds`.
    """
    return _current is None or _current.broker.flush(within_seconds=within_seconds)


atexit.register(flush)


def reset_broker() -> None:
    """Close the broker; the next use builds a new one.

    Call this function between tests, and after the database was replaced.
    """
    global _current
    with _lock:
        if _current is not None:
            _current.broker.close()
        _current = None


def use_broker(broker: InMemoryBroker) -> None:
    """Use another broker in memory from now on. Only test helpers call this function."""
    current = current_engine()
    current.broker = broker
    # The engine has built its broker at the first use, and keeps it.
    vars(current.engine)["broker"] = broker


def let_go_of_test_databases(sender: object, connection: BaseDatabaseWrapper, **_: object) -> None:
    """Receiver of connection_created: close the broker's sessions before a test runner runs DROP DATABASE."""
    if makes_or_drops_databases(connection):
        flush()
        reset_broker()
