"""The broker's own connections to its database, which is an alias of DATABASES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import naming
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.django_internals import running_tests
from outbox.contrib.django.database.in_tests import refuse_in_tests
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.errors import ConfigurationError, NotSupported
from outbox.utils.safe_text import mask_passwords

# Connection parameters of Django or psycopg that libpq does not accept.
_NOT_LIBPQ: Final = frozenset(
    {"client_encoding", "cursor_factory", "context", "prepare_threshold", "row_factory", "autocommit"}
)


def broker_database(settings: OutboxSettings | None = None) -> BrokerDatabase:
    """The broker's database.

    Raises ConfigurationError if the broker's alias is missing or is not a PostgreSQL database, or if the running test
    must not use the alias.
    """
    settings = settings or get_settings()
    if not settings.in_memory:
        require_database(settings)
    refuse_in_tests(settings.broker)
    return database_of(settings)


def database_of(settings: OutboxSettings) -> BrokerDatabase:
    """The broker's database. This function does not check whether the running test may use the database.

    Any test may build a broker object, as long as the test does not use the broker.
    """
    conninfo = alias_conninfo(settings.broker)
    listen = settings.listen_url and _in_role(settings.listen_url, _alias(settings.broker))
    if running_tests():
        # LISTEN_URL names the database of the settings. In a test run the alias leads to a test database, so the broker
        # polls the test database instead.
        listen = None if listen is None else ""
    return BrokerDatabase(conninfo=conninfo, schema=settings.schema, listen_conninfo=listen)


def database_at(alias: str, settings: OutboxSettings) -> BrokerDatabase:
    """The database of a broker on another alias than OUTBOX['BROKER'].

    The name of the broker's schema comes from the settings. Raises ConfigurationError.
    """
    refuse_in_tests(alias)
    return BrokerDatabase(conninfo=alias_conninfo(alias), schema=settings.schema, listen_conninfo="")


@dataclass
class _Shared:
    connection: BrokerConnection | None = None
    is_in_use: bool = False


_shared: ContextVar[_Shared | None] = ContextVar("outbox_shared_connection", default=None)


@contextmanager
def one_connection() -> Iterator[None]:
    """Let `opened` use the same connection for the whole block.

    A page reads the broker in several parts. A new session for each part would take longer than most of the parts,
    because a session begins with empty caches. A block inside of another one uses its connection.
    """
    if _shared.get() is not None:
        yield
        return
    shared = _Shared()
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)
        if shared.connection is not None:
            shared.connection.close()


@contextmanager
def opened(settings: OutboxSettings, *, name: str) -> Iterator[BrokerConnection]:
    """A connection to the broker without an open transaction: that of `one_connection`, or a new one.

    Raises BrokerUnavailable or ConfigurationError.
    """
    shared = _shared.get()
    if shared is None or shared.is_in_use:
        with broker_database(settings).open(name=name) as connection:
            yield connection
        return
    if shared.connection is None:
        shared.connection = broker_database(settings).open(name=name)
    shared.is_in_use = True
    is_whole = False
    try:
        yield shared.connection
        is_whole = shared.connection.info.transaction_status is TransactionStatus.IDLE
    finally:
        shared.is_in_use = False
        if not is_whole:
            # A failed request may have left a statement or a transaction behind.
            shared.connection.close()
            shared.connection = None


@contextmanager
def broker_executor() -> Iterator[Executor]:
    """A connection to the broker's database, on which the driver's errors are raised as BrokerError.

    Raises BrokerUnavailable or ConfigurationError. Raises SchemaError if the tables are missing or have another
    version.
    """
    settings = get_settings()
    require_database(settings)
    with (
        opened(settings, name="outbox-command") as connection,
        naming(f"the request to the broker on {settings.broker!r}", settings.schema),
        deadline.kept_in_transaction(connection, settings.schema),
    ):
        check_schema(connection, settings.schema)
        yield Executor(connection, settings.schema)


P = ParamSpec("P")
T = TypeVar("T")


def on_broker(function: Callable[Concatenate[Executor, P], T], /, *given: P.args, **named: P.kwargs) -> T:
    """Call a function that begins with an Executor, with a connection to the broker. Raises as `broker_executor`."""
    with broker_executor() as run:
        return function(run, *given, **named)


def require_database(settings: OutboxSettings) -> None:
    """Raise ConfigurationError if the broker is only in this process, and NotSupported if it is another engine."""
    if settings.in_memory:
        raise ConfigurationError(
            "OUTBOX['IN_MEMORY'] is on: the broker exists only inside this process and cannot be inspected from "
            "outside."
        )
    if not settings.has_database:
        raise NotSupported(
            "this needs the tables of a broker in PostgreSQL, and OUTBOX['BROKER'] is "
            f"{mask_passwords(repr(settings.broker))}: use the tools of that engine (docs/engines.md)."
        )


def alias_conninfo(alias: str) -> str:
    """The libpq connection string of a Django alias. Raises ConfigurationError."""
    connection = _alias(alias)
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"OUTBOX['BROKER'] = {alias!r} is a {connection.display_name} database: the broker needs PostgreSQL. "
            f"Add an alias of such a database to DATABASES. The application's own data need not move there."
        )
    parameters: dict[str, Any] = connection.get_connection_params()
    return _in_role(
        make_conninfo(**{key: value for key, value in parameters.items() if key not in _NOT_LIBPQ}), connection
    )


def _in_role(conninfo: str, connection: BaseDatabaseWrapper) -> str:
    """The connection string, extended so that sessions begin with the role OPTIONS['assume_role'], as in Django."""
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if not role:
        return conninfo
    escaped = str(role).replace("\\", r"\\").replace(" ", r"\ ")
    options = conninfo_to_dict(conninfo).get("options") or ""
    return make_conninfo(conninfo, options=f"{options} -c role={escaped}".lstrip())


def place_named_by(alias: str) -> tuple[object, ...]:
    """A value that changes when the alias leads to another database, as in a test run.

    Every publish call reads this value.
    """
    # The settings are read from the dictionary that all threads share, because a look-up of this thread's connection
    # would take longer.
    entry = connections.settings.get(alias) or _alias(alias).settings_dict
    role = entry["OPTIONS"].get("assume_role")
    # The options of two aliases may lead to two databases although the other values are the same (a service file).
    return alias, entry["NAME"], entry["HOST"], entry["PORT"], entry["USER"], entry["PASSWORD"], role


def _alias(alias: str) -> BaseDatabaseWrapper:
    try:
        return connections[alias]
    except ConnectionDoesNotExist as error:
        raise ConfigurationError(
            f"OUTBOX['BROKER'] = {mask_passwords(repr(alias))} is not in DATABASES: add that alias, or name another."
        ) from error
