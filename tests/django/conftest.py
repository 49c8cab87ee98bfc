"""Databases for Django: made by `migrate` once per run; the broker's database is fresh for every test."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.django import configured  # isort: skip
from django.core.management import call_command
from django.db import connections
from django.test.utils import override_settings

from outbox.broker import embedded
from outbox.contrib.django import broker as broker_access
from outbox.contrib.django import registry
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.databases import database_from_url
from outbox.contrib.django.installation import install_broker
from outbox.contrib.django.transactions import forget_facts

APPLICATION_ALIASES = ("default", "other", "lite")


def point_alias(alias: str, url: str) -> None:
    """Let an alias of this thread, and of threads to come, name another database."""
    connections[alias].close()
    entry = database_from_url(url)
    for settings in (connections[alias].settings_dict, connections.settings[alias]):
        settings.update(entry)


@pytest.fixture(scope="session")
def django_db_setup(server_url: str, django_db_blocker: Any) -> Iterator[None]:
    """Create and migrate the databases; takes the place of pytest-django's fixture."""
    with tempfile.TemporaryDirectory(prefix="outbox-lite-") as folder, django_db_blocker.unblock():
        for alias in ("default", "other", "broker"):
            point_alias(alias, embedded.create_database(server_url, f"outbox_django_{os.getpid()}_{alias}"))
        for settings in (connections["lite"].settings_dict, connections.settings["lite"]):
            settings["NAME"] = str(Path(folder) / "lite.sqlite3")
        for alias in (*APPLICATION_ALIASES, "broker"):
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        connections["lite"].cursor().execute("PRAGMA journal_mode = WAL")
        with psycopg.connect(server_url, autocommit=True) as connection:
            connections["broker"].close()
            broker_access.reset_broker()
            connection.execute(f"ALTER DATABASE outbox_django_{os.getpid()}_broker IS_TEMPLATE true")
        yield
        broker_access.reset_broker()
        connections.close_all()
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE outbox_django_{os.getpid()}_broker IS_TEMPLATE false")
            for alias in ("default", "other", "broker"):
                connection.execute(f"DROP DATABASE outbox_django_{os.getpid()}_{alias} WITH (FORCE)")


@pytest.fixture
def databases(django_db_setup: None, django_db_blocker: Any, new_database: Callable[..., str]) -> Iterator[None]:
    """Empty application databases and a fresh broker, without any wrapping transaction."""
    with django_db_blocker.unblock():
        point_alias("broker", new_database(template=f"outbox_django_{os.getpid()}_broker"))
        yield
        broker_access.flusher.flush(within_seconds=5)
        broker_access.reset_broker()
        for alias in APPLICATION_ALIASES:
            with connections[alias].cursor() as cursor:
                for table in ("outbox_ledger", "outbox_inbox", "shop_order", "shop_payment", "shop_effect"):
                    cursor.execute(f"DELETE FROM {table}")
        forget_facts()
        connections.close_all()


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
def path(request: pytest.FixtureRequest, databases: None, outbox_settings: Callable[..., None]) -> Iterator[str]:
    """Either path: with the broker in its own database, or in the application's."""
    if request.param == "two_phase":
        yield "two_phase"
        return
    outbox_settings(BROKER="default")
    install_broker(get_settings())
    yield "atomic"
    broker_access.reset_broker()
    with connections["default"].cursor() as cursor:
        cursor.execute("DROP SCHEMA outbox CASCADE")


@pytest.fixture
def in_memory(databases: None, outbox_settings: Callable[..., None]) -> Iterator[None]:
    """The in-memory broker."""
    outbox_settings(IN_MEMORY=True)
    broker_access.reset_broker()
    yield
    broker_access.reset_broker()


@pytest.fixture
def no_subscribers() -> Iterator[None]:
    """Subscribers that a test registers are forgotten after it."""
    registry.unregister_all()
    yield
    registry.unregister_all()


__all__ = ["configured"]
