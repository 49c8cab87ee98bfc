"""One set of databases for all programs: an application's, a broker's, and a SQLite file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.django import configured  # isort: skip
from django.core.management import call_command
from django.db import connections
from django.test.utils import override_settings

from outbox.broker import embedded
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers import registry
from tests.django.conftest import point_alias
from tests.mistakes.campaign import Campaign
from tests.mistakes.worlds import World


@pytest.fixture(scope="package")
def worlds(server_url: str, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Databases of this folder's own. The aliases name them until the last of its tests, then what they did before."""
    aliases = ("default", "other", "broker", "lite")
    before = {alias: dict(connections.settings[alias]) for alias in aliases}
    names = {alias: f"outbox_mistakes_{os.getpid()}_{alias}" for alias in ("default", "broker")}
    with django_db_blocker.unblock():
        for alias, name in names.items():
            point_alias(alias, embedded.create_database(server_url, name))
        point_alias("other", embedded.database_url(server_url, names["default"]))
        _point("lite", {"NAME": str(tmp_path_factory.mktemp("mistakes") / "lite.sqlite3")})
        for alias in ("default", "broker", "lite"):
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        with override_settings(OUTBOX={**configured.OUTBOX, "BROKER": "default"}):
            install_broker(get_settings())
        with connections["lite"].cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")
        yield
        broker_access.reset_broker()
        connections.close_all()
        for alias, entry in before.items():
            _point(alias, entry)
    with psycopg.connect(server_url, autocommit=True) as connection:
        for name in names.values():
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _point(alias: str, entry: dict[str, Any]) -> None:
    connections[alias].close()
    for settings in (connections[alias].settings_dict, connections.settings[alias]):
        settings.update(entry)


@pytest.fixture(scope="package")
def campaigns(worlds: None) -> Iterator[dict[World, Campaign]]:
    """The open campaigns. Most programs take less time than the sessions and the consumer group of a new campaign."""
    made: dict[World, Campaign] = {}
    yield made
    for campaign in made.values():
        campaign.close()


@pytest.fixture
def campaign_in(campaigns: dict[World, Campaign], django_db_blocker: Any) -> Iterator[Callable[[World], Campaign]]:
    """A function that returns the campaign of a world, and makes its settings those of the test."""
    with django_db_blocker.unblock():
        registry.unregister_all()
        changed: list[Any] = []

        def open_campaign(world: World) -> Campaign:
            changed.append(override_settings(OUTBOX={**configured.OUTBOX, "BROKER": world.broker}))
            changed[-1].enable()
            if world not in campaigns:
                campaigns[world] = Campaign(world.alias)
            return campaigns[world]

        yield open_campaign
        broker_access.flush(within_seconds=5)
        broker_access.reset_broker()
        for item in changed:
            item.disable()
        registry.unregister_all()
        connections.close_all()
