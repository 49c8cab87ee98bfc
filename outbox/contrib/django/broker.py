"""The one broker of this process, made from the settings when first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist
from psycopg.conninfo import make_conninfo

from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.place import Place
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import check_schema
from outbox.codec import Codec, Codecs
from outbox.contrib.django.conf import OutboxSettings, get_settings, imported
from outbox.contrib.django.flusher import Flusher
from outbox.contrib.django.in_tests import refuse_in_tests, running_tests, without_idle_sessions
from outbox.errors import ConfigurationError
from outbox.memory import InMemoryBroker
from outbox.safe_text import mask_passwords
from outbox.transaction import CheckSettings

# Connection parameters that are Django's or psycopg's, not libpq's.
_NOT_LIBPQ: Final = frozenset(
    {"client_encoding", "cursor_factory", "context", "prepare_threshold", "row_factory", "autocommit"}
)


class _Current:
    """What was built from one settings object for one database."""

    def __init__(self, settings: OutboxSettings, place: tuple[object, ...]) -> None:
        self.settings = settings
        self.place = place
        self.codecs = _codecs(settings)
        self.catalog = TopicCatalog(
            settings.schema, auto_create=settings.auto_create_topics, selectors=_selectors(settings)
        )
        self.broker: InMemoryBroker | PostgresBroker = self._memory() if settings.in_memory else self._postgres()
        # For every alias, by where it leads: the place where the atomic path was proven, or None for two-phase.
        self.paths: dict[tuple[object, ...], Place | None] = {}

    def _memory(self) -> InMemoryBroker:
        from outbox.contrib.django.inbox import InboxInvoker

        return InMemoryBroker(
            [declared.topic for declared in self.settings.topics.values()],
            auto_create_topics=self.settings.auto_create_topics or not self.settings.topics,
            codecs=self.codecs,
            invoker=InboxInvoker(lease_seconds=self.settings.lease_seconds),
            check=check_settings(self.settings),
        )

    def _postgres(self) -> PostgresBroker:
        return PostgresBroker(_database(self.settings), catalog=self.catalog, check=check_settings(self.settings))

    def close(self) -> None:
        if isinstance(self.broker, PostgresBroker):
            self.broker.close()


_current: _Current | None = None
_lock = threading.Lock()


def _get() -> _Current:
    global _current
    settings = get_settings()
    place = () if settings.in_memory else place_named_by(settings.broker)
    current = _current
    if current is not None and current.settings is settings and current.place == place:
        return current
    with _lock:
        if _current is None or _current.settings is not settings or _current.place != place:
            if _current is not None:
                _current.close()
            _current = _Current(settings, place)
        return _current


def place_named_by(alias: str) -> tuple[object, ...]:
    """What tells whether an alias still names the same database: test runners change it. Asked by every publish."""
    entry = _alias(alias).settings_dict
    return entry["NAME"], entry["HOST"], entry["PORT"], entry["USER"], entry["PASSWORD"]


def get_broker() -> InMemoryBroker | PostgresBroker:
    """The broker that the settings name; the same object until they change. Raises ConfigurationError."""
    current = _get()
    if not current.settings.in_memory:
        refuse_in_tests(current.settings.broker)
    return current.broker


def get_codecs() -> Codecs:
    """The codecs of the declared topics."""
    return _get().codecs


def get_catalog() -> TopicCatalog:
    """The topics the broker knows, for the atomic path."""
    return _get().catalog


def reset_broker() -> None:
    """Close the broker and build another at the next use: between tests, and after the database was replaced."""
    global _current
    with _lock:
        if _current is not None:
            _current.close()
        _current = None


def remembered_paths() -> dict[tuple[object, ...], Place | None]:
    """What this process has decided about paths (see the module `path`), until the settings change."""
    return _get().paths


def broker_database(settings: OutboxSettings | None = None) -> BrokerDatabase:
    """Where the broker lives.

    Raises ConfigurationError when its alias is missing or not PostgreSQL, or when the test that runs must not use it.
    """
    settings = settings or get_settings()
    refuse_in_tests(settings.broker)
    return _database(settings)


def _database(settings: OutboxSettings) -> BrokerDatabase:
    conninfo = alias_conninfo(settings.broker)
    if running_tests():
        conninfo = without_idle_sessions(conninfo)
    return BrokerDatabase(conninfo=conninfo, schema=settings.schema, listen_conninfo=settings.listen_url)


@contextmanager
def broker_connection() -> Iterator[tuple[Connection, str]]:
    """A connection to the broker's database and its schema.

    Raises BrokerUnavailable, ConfigurationError, or SchemaError when the tables are missing or of another age.
    """
    settings = get_settings()
    if settings.in_memory:
        raise ConfigurationError("OUTBOX['IN_MEMORY'] is on: there is no broker outside this process to look at.")
    with broker_database(settings).connect(name="outbox-command") as connection:
        check_schema(connection, settings.schema)
        yield connection, settings.schema


def alias_conninfo(alias: str) -> str:
    """The libpq connection string of a Django alias. Raises ConfigurationError."""
    connection = _alias(alias)
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"OUTBOX['BROKER'] = {alias!r} is a {connection.display_name} database: the broker needs PostgreSQL. "
            f"Add an alias for one to DATABASES; the application's own data may stay where it is."
        )
    parameters: dict[str, Any] = connection.get_connection_params()
    return make_conninfo(**{key: value for key, value in parameters.items() if key not in _NOT_LIBPQ})


def _alias(alias: str) -> BaseDatabaseWrapper:
    try:
        return connections[alias]
    except ConnectionDoesNotExist as error:
        raise ConfigurationError(
            f"OUTBOX['BROKER'] = {mask_passwords(repr(alias))} is not in DATABASES: add that alias, or name another."
        ) from error


def check_topic_imports(settings: OutboxSettings) -> None:
    """Import what TOPICS names. Raises ConfigurationError."""
    _codecs(settings)
    _selectors(settings)


def _codecs(settings: OutboxSettings) -> Codecs:
    by_topic: dict[str, Codec] = {}
    for name, declared in settings.topics.items():
        if declared.codec is not None:
            made = imported(f"OUTBOX['TOPICS'][{name!r}]['codec']", declared.codec)
            by_topic[name] = made() if isinstance(made, type) else made
    return Codecs(by_topic=by_topic)


def _selectors(settings: OutboxSettings) -> dict[str, Callable[..., int]]:
    return {
        name: imported(f"OUTBOX['TOPICS'][{name!r}]['selector']", declared.selector)
        for name, declared in settings.topics.items()
        if declared.selector is not None
    }


def check_settings(settings: OutboxSettings) -> CheckSettings:
    """When half messages are asked about, as the settings say."""
    return CheckSettings(
        immunity_seconds=settings.immunity_seconds,
        recheck_seconds=settings.check_retry_seconds,
        max_checks=settings.max_checks,
        max_age_seconds=settings.max_check_age_seconds,
    )


flusher: Final = Flusher(get_broker)
