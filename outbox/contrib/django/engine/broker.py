"""The engine that the settings choose for this process, and its broker. Each object is built when it is first used."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from outbox import hooks
from outbox.broker.database.executor import Executor
from outbox.broker.database.server_identity import ServerIdentity
from outbox.codec import Codecs
from outbox.contrib.django.database.aliases import place_named_by
from outbox.contrib.django.database.django_internals import settings_read
from outbox.contrib.django.database.in_tests import makes_or_drops_databases, refuse_in_tests
from outbox.contrib.django.engine.engine import Engine
from outbox.contrib.django.settings import conf
from outbox.contrib.django.settings.conf import EngineName, OutboxSettings
from outbox.hooks import Draft
from outbox.message import Message
from outbox.ports import Broker

if TYPE_CHECKING:
    from outbox.memory import InMemoryBroker

# Dotted paths, because a process needs the memory for one engine only.
_ENGINES: Final[Mapping[str, str]] = {
    EngineName.POSTGRES: "outbox.contrib.django.engine.postgres.PostgresEngine",
    EngineName.MEMORY: "outbox.contrib.django.engine.memory.MemoryEngine",
}
_FLUSH_SECONDS: Final = 2.0


class BodyStep:
    """What a part does with all messages of this process (`outbox.hooks.add_body_step`).

    An error refuses the messages, and nothing is published. A subclass overrides what it needs: a part that only adds a
    header overrides `encode`.
    """

    __slots__ = ()

    def encode(self, draft: Draft) -> None:
        """Change the draft of a message (its body or its headers), after the options of the message have done so."""

    def before_append(self, run: Executor, messages: Sequence[Message]) -> None:
        """Called in the transaction that stores these messages, before it stores them (the atomic path)."""

    def while_sending(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Return the block in which the broker stores these messages in a transaction of its own."""
        return nullcontext()


class CurrentEngine:
    """The engine, the broker and the caches that belong to one settings object and one database.

    `outbox` and `forced_keys` are the values from which the settings were read.
    """

    def __init__(self, read: conf.SettingsRead) -> None:
        outbox, self.forced_keys, settings, _ = read
        # A missing setting is looked up each time, because `settings_read` never has it.
        self.outbox = object() if outbox is None else outbox
        self.settings = settings
        self.has_database = settings.has_database
        self.place = _place(settings)
        self.engine = engine_of(settings)
        self.codecs = self.engine.codecs
        self.catalog = self.engine.catalog
        self.broker = self.engine.broker
        steps = (hooks.resolved(path)() for path in hooks.body_steps.values())
        self.body_steps: Sequence[BodyStep] = [step for step in steps if step is not None]
        # The paths (atomic or two-phase) that this process uses, as `publish._proven_server` has chosen them. The keys
        # are the targets of aliases. A value is the server on which the atomic path was proven, or None if messages
        # take the two-phase path.
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


def _place(settings: OutboxSettings) -> tuple[object, ...]:
    return place_named_by(settings.broker) if settings.has_database else ()


def _fits(current: CurrentEngine, settings: OutboxSettings) -> bool:
    return current.settings is settings and current.place == _place(settings)


_current: CurrentEngine | None = None
_lock = threading.Lock()


def engine_of(settings: OutboxSettings) -> Engine:
    """A new engine for these settings, separate from the engine of this process. Checks and commands use it."""
    path = _ENGINES.get(settings.engine) or hooks.engines[settings.engine].kind
    engine: Engine = import_string(path)(settings)
    return engine


def current_engine() -> CurrentEngine:
    """The engine of this process with its caches; the same object until the settings change.

    Each publish call asks, so the usual case calls no function. Raises ConfigurationError.
    """
    global _current
    current = _current
    if (
        current is not None
        and settings_read.get("OUTBOX") is current.outbox
        and conf.forced_keys is current.forced_keys
    ):
        if not current.has_database:
            return current
        # The alias may lead to another database than before, as in a test run.
        alias = current.settings.broker
        entry = connections.settings.get(alias)
        if entry is not None and current.place == (
            *(alias, entry["NAME"], entry["HOST"], entry["PORT"], entry["USER"], entry["PASSWORD"]),
            entry["OPTIONS"].get("assume_role"),
        ):
            return current
    read = conf.read_settings()
    settings = read[2]
    if current is not None and _fits(current, settings):
        # Without OUTBOX, each call comes here. It takes no lock, which a forked child could inherit locked.
        return current
    with _lock:
        if _current is not None:
            if _fits(_current, settings):
                return _current
            _current.broker.close()
        _current = CurrentEngine(read)
        return _current


def get_engine() -> Engine:
    """The engine of this process; the same object until the settings change. Raises ConfigurationError."""
    return current_engine().engine


def get_broker() -> Broker:
    """The broker of this process; the same object until the settings change. Raises ConfigurationError."""
    return current_engine().broker_to_use()


def get_codecs() -> Codecs:
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
