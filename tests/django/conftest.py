"""Databases for Django: made by `migrate` once per run; the broker's database is fresh for every test."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from tests.django import configured  # isort: skip
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from django.db.backends.postgresql.base import DatabaseWrapper as PostgresWrapper
from django.test.utils import override_settings
from django.utils import translation

from outbox.broker import embedded
from outbox.contrib.django.databases import database_from_url
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.ledger import pruning
from outbox.contrib.django.models import ClaimEntry, StepEntry
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers import registry
from tests.django.sessions import close_sessions
from tests.mariadb import NOT_ON_MARIADB, PrivateMariaDB
from tests.part_apps import has


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a run with MariaDB, skip the tests that are about SQLite itself."""
    if configured.ON_MARIADB:
        for item in items:
            if reason := NOT_ON_MARIADB.get(item.name):
                item.add_marker(pytest.mark.skip(reason=reason))


APPLICATION_ALIASES = ("default", "other", "lite")


def point_alias(alias: str, url: str) -> None:
    """Let an alias of this thread, and of threads to come, name another database."""
    _point_alias(alias, database_from_url(url))


def _point_alias(alias: str, entry: dict[str, Any]) -> None:
    connections[alias].close()
    for settings in (connections[alias].settings_dict, connections.settings[alias]):
        settings.update(entry)


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[PrivateMariaDB]:
    """The MariaDB of the alias `lite`, in a run with `OUTBOX_TEST_MARIADB`."""
    with tempfile.TemporaryDirectory(prefix="outbox-mariadb-", ignore_cleanup_errors=True) as folder:
        server = PrivateMariaDB(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def django_db_setup(server_url: str, django_db_blocker: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """Create and migrate the databases; takes the place of pytest-django's fixture."""
    names = [*(_name(alias) for alias in ("default", "other", "broker")), BROKER_TEMPLATE]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-lite-")))
        stack.enter_context(django_db_blocker.unblock())
        for alias in ("default", "other", "broker"):
            point_alias(alias, embedded.create_database(server_url, _name(alias)))
        if configured.ON_MARIADB:
            server: PrivateMariaDB = request.getfixturevalue("mariadb_server")
            _point_alias("lite", server.create_database(_name("lite")))
        else:
            _point_alias("lite", {"NAME": str(folder / "lite.sqlite3")})
        for alias in (*APPLICATION_ALIASES, "broker"):
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        if not configured.ON_MARIADB:
            with connections["lite"].cursor() as cursor:
                cursor.execute("PRAGMA journal_mode = WAL")
        connections.close_all()
        broker_access.reset_broker()
        embedded.create_database(server_url, BROKER_TEMPLATE, template=_name("broker"))
        yield
        broker_access.reset_broker()
        connections.close_all()
        with psycopg.connect(server_url, autocommit=True) as connection:
            for name in names:
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _name(alias: str) -> str:
    return f"outbox_django_{os.getpid()}_{alias}"


BROKER_TEMPLATE = _name("template")


_CLEANED = (
    *("outbox_inbox", "outbox_operator_action", "outbox_unique", "outbox_erased"),
    "outbox_raised_condition",
    *("outbox_finding", "outbox_reconciliation", "outbox_relay", "outbox_relay_lease"),
    *("shop_order", "shop_payment", "shop_effect"),
)
_INSTALLED = {model._meta.db_table for model in apps.get_models()}
# A tree without a part has none of its tables.
OF_THE_APPLICATION = tuple(name for name in _CLEANED if name in _INSTALLED)


class Cleaner:
    """Deletes what tests leave in a database, over a session that stays open: opening one takes longer."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._session: Any = None

    def delete(self, *tables: str, truncated: str = "", before: str = "") -> None:
        """Delete the rows of the tables that have any, in this order.

        Truncate the table `truncated` first if it had a row since it was truncated. Execute `before` first of all if
        there is anything to delete.
        """
        try:
            self._delete(tables, truncated, before)
        except psycopg.OperationalError:
            # The test has ended all sessions of the database.
            self.close()
            self._delete(tables, truncated, before)

    def rows(self, query: str) -> list[Any] | None:
        """The rows of a query; None if it fails."""
        try:
            return list(self._open().execute(query).fetchall())
        except psycopg.Error:
            return None

    def execute(self, statement: LiteralString) -> None:
        self._open().execute(statement)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _open(self) -> Any:
        if self._session is None:
            self._session = self._connect()
        return self._session

    def _delete(self, tables: Sequence[str], truncated: str, before: str) -> None:
        session = self._open()
        found = [
            f"SELECT '{table}' FROM (SELECT 1 AS row_of_its_own) AS one WHERE EXISTS (SELECT * FROM {table})"
            for table in tables
        ]
        if truncated:
            found.append(f"SELECT '{truncated}' WHERE pg_relation_size('{truncated}') > 0")
        with session.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(found))
            filled = {name for (name,) in cursor.fetchall()}
            if filled and before:
                cursor.execute(before)
            # TRUNCATE makes new files of the table and its indexes.
            if truncated in filled:
                cursor.execute(f"TRUNCATE {truncated}")
            for table in tables:
                if table in filled:
                    cursor.execute(f"DELETE FROM {table}")


@pytest.fixture(scope="session")
def cleaners(server_url: str, django_db_setup: None) -> Iterator[dict[str, Cleaner]]:
    """The cleaner of each database that is not made anew for each test."""

    def connecting(alias: str) -> Callable[[], Any]:
        url = embedded.database_url(server_url, _name(alias))
        return lambda: psycopg.connect(url, autocommit=True, options="-c synchronous_commit=off")

    made = {alias: Cleaner(connecting(alias)) for alias in ("default", "other", "broker")}
    lite = connections["lite"].copy()
    made["lite"] = Cleaner(lambda: lite)
    yield made
    close_sessions()
    for cleaner in made.values():
        cleaner.close()


@pytest.fixture
def application(django_db_setup: None, cleaners: dict[str, Cleaner], django_db_blocker: Any) -> Iterator[None]:
    """Empty application databases, without any wrapping transaction."""
    with django_db_blocker.unblock():
        yield
        # First, so that no session of the test locks what is deleted.
        connections.close_all()
        for alias in ("default", "other"):
            # As Django's flush does; it is another ledger afterwards.
            cleaners[alias].delete(*OF_THE_APPLICATION, truncated="outbox_ledger")
        cleaners["lite"].delete("outbox_ledger", *OF_THE_APPLICATION)
        # A page leaves the language of its visitor.
        translation.deactivate()
        # A pass that was cut short would continue behind the rows of the next test.
        pruning._sweeps.clear()
        # A pool that a test has left would serve the next one with sessions that were ended meanwhile.
        assert not PostgresWrapper._connection_pools, "close the pool at the end of the test"  # type: ignore[attr-defined]


@pytest.fixture
def empty_log(application: None, cleaners: dict[str, Cleaner]) -> Iterator[None]:
    """A broker without messages, but with the ticks and groups of earlier tests."""
    yield
    broker_access.flush(within_seconds=5)
    _empty_log(cleaners["broker"])


@pytest.fixture
def databases(application: None, new_database: Callable[..., str], server_url: str) -> Iterator[None]:
    """A fresh broker."""
    point_alias("broker", new_database(template=BROKER_TEMPLATE))
    yield
    broker_access.flush(within_seconds=5)
    broker_access.reset_broker()
    close_sessions()
    point_alias("broker", embedded.database_url(server_url, _name("broker")))


# As retention does when it removes entries: offsets continue.
RAISE_FLOORS = """
UPDATE outbox.queue SET floor = removed.upper
FROM (SELECT queue_id, max(queue_offset) + 1 AS upper FROM outbox.consume_queue GROUP BY queue_id) removed
WHERE removed.queue_id = queue.queue_id AND queue.floor < removed.upper
"""


def _empty_log(cleaner: Cleaner) -> None:
    connections.close_all()
    cleaner.delete(
        *("outbox.consume_queue", "outbox.held", "outbox.scheduled", "outbox.op_log", "outbox.commit_log"),
        *("outbox.pending_check", "outbox.check_history", "outbox.incident", "outbox.recalled"),
        "outbox.producer_epoch",
        before=RAISE_FLOORS,
    )


@pytest.fixture
def outbox_settings() -> Iterator[Callable[..., None]]:
    """A function that changes single keys of OUTBOX for this test."""
    with contextlib.ExitStack() as stack:

        def change(**keys: Any) -> None:
            from django.conf import settings

            changed = override_settings(OUTBOX={**settings.OUTBOX, **keys})
            changed.enable()
            stack.callback(changed.disable)

        yield change


@pytest.fixture(params=["two_phase", "atomic"])
def path(
    request: pytest.FixtureRequest,
    empty_log: None,
    cleaners: dict[str, Cleaner],
    outbox_settings: Callable[..., None],
) -> Iterator[str]:
    """Either path: with the broker in its own database, or in the application's."""
    if request.param == "two_phase":
        yield "two_phase"
        return
    outbox_settings(BROKER="default")
    _install_in_default(cleaners["default"])
    yield "atomic"
    broker_access.flush(within_seconds=5)
    _empty_log(cleaners["default"])


_TOPICS = "SELECT to_jsonb(topic)::text FROM outbox.topic ORDER BY 1"
# As the last installation has left them.
_topics_of_default: list[Any] = []


def _install_in_default(cleaner: Cleaner) -> None:
    """Install the broker, unless its topics are as the last installation has left them.

    A test that changed a topic has left queues of another layout too, which groups would consume first.
    """
    broker_access.reset_broker()
    if not _topics_of_default or cleaner.rows(_TOPICS) != _topics_of_default:
        connections.close_all()
        close_sessions()
        cleaner.execute("DROP SCHEMA IF EXISTS outbox CASCADE")
        install_broker(get_settings())
        _topics_of_default[:] = cleaner.rows(_TOPICS) or []
        broker_access.reset_broker()


@pytest.fixture
def no_subscribers() -> Iterator[None]:
    """Subscribers that a test registers are forgotten after it."""
    registry.unregister_all()
    yield
    registry.unregister_all()


@pytest.fixture
def no_events() -> Iterator[None]:
    """The events that other test modules declare are unknown during a test."""
    if not has("events"):
        yield
        return
    declaration: Any = import_module("outbox.events.declaration")
    with declaration.restored():
        declaration.forget()
        yield


@pytest.fixture
def no_claims() -> Iterator[None]:
    """Claims and steps are removed after the test."""
    yield
    for alias in ("default", "lite"):
        ClaimEntry.objects.using(alias).all().delete()
        StepEntry.objects.using(alias).all().delete()


__all__ = ["configured"]
