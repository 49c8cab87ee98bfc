"""Guards an application's tests: they use only the databases that Django allows them to use.

The broker has its own connections. These connections of the broker do not use the database names of the test run, and
Django's guard against undeclared databases does not check them. Without this module, a test would publish into the
development broker, and a worker would handle the message.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper

from outbox.contrib.django.database.django_internals import running_tests
from outbox.errors import ConfigurationError

# The NAME of each alias when the process was set up. Later a test runner gives other names to its databases.
_configured: Final[dict[str, Any]] = {}

_REMEDY: Final = (
    "set OUTBOX['IN_MEMORY'] = True for tests (OutboxTestMixin of outbox.contrib.django.testing does), or add "
    "{alias!r} to the `databases` of a TransactionTestCase, so that a test database is made and used"
)


def remember_configured_names() -> None:
    """Record the configured names of the databases.

    `OutboxConfig.ready` calls this function. Django calls `ready` when the process starts, and again when a test
    overrides INSTALLED_APPS.
    """
    for alias in connections:
        _configured.setdefault(alias, connections.settings[alias]["NAME"])


def makes_or_drops_databases(connection: BaseDatabaseWrapper) -> bool:
    """Whether a test runner has made this connection to create or drop test databases.

    While the test runner drops databases, the broker must have no open session, because PostgreSQL refuses to drop a
    database that has sessions.
    """
    return running_tests() and connection.alias == NO_DB_ALIAS


# The last use that was allowed: the alias, the guard of the running test, and the name of the database. A publish call
# compares them, because to ask the guard takes as long as half of the call.
_allowed: tuple[Any, ...] = ()


def refuse_in_tests(alias: str) -> None:
    """Raise ConfigurationError if the running test must not use the database of `alias`. Opens no connection."""
    global _allowed
    if not running_tests() or alias not in connections.settings:
        # The code that uses the alias will report that the alias is missing.
        return
    use = (alias, BaseDatabaseWrapper.ensure_connection, connections.settings[alias]["NAME"])
    if use == _allowed:
        return
    if why := guarded_off(alias) or _not_made_for_tests(alias):
        raise ConfigurationError(
            f"this test would use the broker on {alias!r}, which is not a database of the test ({why}): "
            f"{_REMEDY.format(alias=alias)}."
        )
    _allowed = use


def guarded_off(alias: str) -> str:
    """The reason why the running test must not use the database of `alias`, or ''. Opens no connection."""
    if not _is_guarded():
        return ""
    try:
        # If the guard allows the database, Django may still refuse to connect in a coroutine. Django's
        # SynchronousOnlyOperation is ignored, because it is not an error of the guard.
        with suppress(SynchronousOnlyOperation):
            BaseDatabaseWrapper.ensure_connection(_Probe(alias))
    except (AssertionError, RuntimeError) as error:
        # The guard of Django or pytest-django raises an AssertionError or a RuntimeError.
        return str(error) or type(error).__name__
    return ""


def refuse_processes_in_tests() -> None:
    """Raise ConfigurationError in a test, because a new process would use the databases of the settings."""
    if running_tests():
        raise ConfigurationError(
            "a worker that a test starts would use the databases of the settings, not those of the test: run the "
            "subscribers in this process, with `drain()` of OutboxTestMixin or `outbox_worker --drain`."
        )


def _is_guarded() -> bool:
    guard: Any = BaseDatabaseWrapper.ensure_connection
    return bool(guard.__module__ != BaseDatabaseWrapper.__module__)


class _Probe(BaseDatabaseWrapper):
    """A connection object for the guard to check. The object never connects to a database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.connection = None
        self.in_atomic_block = False

    def connect(self) -> None:
        """Do nothing."""


def _not_made_for_tests(alias: str) -> str:
    if _is_guarded():
        return ""
    name = connections[alias].settings_dict["NAME"]
    return f"{name!r} is the database of the settings" if _configured.get(alias) == name else ""
