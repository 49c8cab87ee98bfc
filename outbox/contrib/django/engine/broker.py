"""The one broker of this process, built from the settings at its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.broker.database.server_identity import ServerIdentity
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.postgres import PostgresBroker
from outbox.codec import Codec, Codecs
from outbox.contrib.django.database.aliases import database_of, place_named_by
from outbox.contrib.django.database.in_tests import makes_or_drops_databases, refuse_in_tests
from outbox.contrib.django.engine.flusher import Flusher
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings, imported
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.errors import ConfigurationError
from outbox.memory import InMemoryBroker

if TYPE_CHECKING:
    from outbox.rocketmq.broker import RocketMQBroker


AnyBroker: TypeAlias = "InMemoryBroker | PostgresBroker | RocketMQBroker"


class _Current:
    """The objects built from one settings object for one database."""

    def __init__(self, settings: OutboxSettings, place: tuple[object, ...]) -> None:
        self.settings = settings
        self.place = place
        self._has_database = settings.has_database
        self.codecs = _codecs(settings)
        self.catalog = TopicCatalog(
            settings.schema, auto_create=settings.auto_create_topics, selectors=_selectors(settings)
        )
        self.broker = self._made()
        # For each alias, by its target: the place where the atomic path was proven, or None for two-phase.
        self.paths: dict[tuple[object, ...], ServerIdentity | None] = {}
        # When the process last recorded that an alias leads elsewhere (time.monotonic).
        self.path_reports: dict[str, float] = {}

    def _made(self) -> AnyBroker:
        if self.settings.in_memory:
            return self._memory()
        return self._rocketmq() if self.settings.is_rocketmq else self._postgres()

    def _memory(self) -> InMemoryBroker:
        return InMemoryBroker(
            [declared.topic for declared in self.settings.topics.values()],
            auto_create_topics=self.settings.auto_create_topics or not self.settings.topics,
            codecs=self.codecs,
            invoker=InboxInvoker(lease_seconds=self.settings.lease_seconds),
            check=self.settings.check,
        )

    def _postgres(self) -> PostgresBroker:
        return PostgresBroker(database_of(self.settings), catalog=self.catalog, check=self.settings.check)

    def _rocketmq(self) -> RocketMQBroker:
        # Imported here because it is an extra: only projects on RocketMQ have its client.
        from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
        from outbox.rocketmq.answering import AnsweringThread
        from outbox.rocketmq.broker import RocketMQBroker

        group = self.settings.producer_group
        return RocketMQBroker(
            self.settings.broker,
            [declared.topic for declared in self.settings.topics.values()],
            check=self.settings.check,
            timeout_seconds=self.settings.send_timeout_seconds,
            answering=lambda producer: AnsweringThread(producer, get_broker, group, LedgerChecker),
        )

    def is_for(self, settings: OutboxSettings) -> bool:
        """Whether the settings are the same, and their alias leads to the same database."""
        return self.settings is settings and (not self._has_database or place_named_by(settings.broker) == self.place)

    def close(self) -> None:
        if not isinstance(self.broker, InMemoryBroker):
            self.broker.close()


_current: _Current | None = None
_lock = threading.Lock()


def _get() -> _Current:
    global _current
    settings = get_settings()
    current = _current
    if current is not None and current.is_for(settings):
        return current
    with _lock:
        if _current is None or not _current.is_for(settings):
            if _current is not None:
                _current.close()
            _current = _Current(settings, place_named_by(settings.broker) if settings.has_database else ())
        return _current


def get_broker() -> AnyBroker:
    """The broker of the settings; the same object until they change. Raises ConfigurationError."""
    current = _get()
    if current.settings.has_database:
        refuse_in_tests(current.settings.broker)
    return current.broker


def get_codecs() -> Codecs:
    """The codec of this project, and those of its topics."""
    return _get().codecs


def get_catalog() -> TopicCatalog:
    """The topics of the broker, for the atomic path."""
    return _get().catalog


def reset_broker() -> None:
    """Close the broker; the next use builds another. For use between tests, and after the database was replaced."""
    global _current
    with _lock:
        if _current is not None:
            _current.close()
        _current = None


def let_go_of_test_databases(sender: object, connection: BaseDatabaseWrapper, **_: object) -> None:
    """Receiver of connection_created: close the broker's sessions before a test runner runs DROP DATABASE."""
    if makes_or_drops_databases(connection):
        flusher.flush()
        reset_broker()


def remembered_paths() -> dict[tuple[object, ...], ServerIdentity | None]:
    """This process's decisions about paths (see the module `path`), until the settings change."""
    return _get().paths


def path_reports() -> dict[str, float]:
    """When this process last recorded, per alias, that its path leads elsewhere; until the settings change."""
    return _get().path_reports


def check_topic_imports(settings: OutboxSettings) -> None:
    """Import the codecs of CODEC and TOPICS. Raises ConfigurationError."""
    _codecs(settings)
    _selectors(settings)


def _codecs(settings: OutboxSettings) -> Codecs:
    default = None if settings.codec is None else _codec("OUTBOX['CODEC']", settings.codec)
    by_topic = {
        name: _codec(f"OUTBOX['TOPICS'][{name!r}]['codec']", declared.codec)
        for name, declared in settings.topics.items()
        if declared.codec is not None
    }
    return Codecs(default, by_topic=by_topic)


def _codec(where: str, dotted_path: str) -> Codec:
    made = imported(where, dotted_path)
    codec = made() if isinstance(made, type) else made
    if lacking := [name for name in ("content_type", "encode", "decode") if not hasattr(codec, name)]:
        raise ConfigurationError(
            f"{where} = {dotted_path!r} is not a codec, it has no {' and no '.join(lacking)}: see outbox.Codec."
        )
    return cast(Codec, codec)


def _selectors(settings: OutboxSettings) -> dict[str, Callable[..., int]]:
    return {
        name: imported(f"OUTBOX['TOPICS'][{name!r}]['selector']", declared.selector)
        for name, declared in settings.topics.items()
        if declared.selector is not None
    }


def _one_way() -> PostgresBroker | None:
    """The broker of this process, if it is already built and takes decisions one way."""
    broker = None if _current is None else _current.broker
    return broker if isinstance(broker, PostgresBroker) else None


flusher: Final = Flusher(get_broker, _one_way)
