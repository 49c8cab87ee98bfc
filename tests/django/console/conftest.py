"""A broker with a leader, a user with every permission, and the pages as a site for browsers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
from django.core.servers.basehttp import ThreadedWSGIServer
from django.db import connections
from django.test import Client
from django.test.testcases import QuietWSGIRequestHandler

from outbox.broker import embedded
from outbox.contrib.django.database.aliases import alias_conninfo, one_connection
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.reconciliation.models import Finding
from tests.django.broker_world import World, new_world
from tests.django.conftest import point_alias
from tests.django.console.support import Site
from tests.django.operators import ALL, client_of, make_user
from tests.servers import private_postgres


@pytest.fixture
def world(databases: None, outbox_settings: Callable[..., None]) -> Iterator[World]:
    """A healthy broker, and afterwards no user and no audit."""
    with new_world(outbox_settings) as world:
        yield world
    for model in (OperatorAction, Finding, User):
        model.objects.all().delete()


@pytest.fixture
def one_session() -> Iterator[None]:
    """All pages of a test read the broker in one session. A session with empty caches takes longer than a page."""
    with one_connection():
        yield


@pytest.fixture
def operator(world: World) -> Client:
    """A user with every permission."""
    return client_of(make_user(*ALL))


@pytest.fixture
def site(world: World) -> Iterator[Site]:
    """The pages, served by threads as by a development server."""
    server = ThreadedWSGIServer(("127.0.0.1", 0), QuietWSGIRequestHandler)
    server.set_app(StaticFilesHandler(WSGIHandler()))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    allowed = settings.ALLOWED_HOSTS
    settings.ALLOWED_HOSTS = [*allowed, "127.0.0.1"]
    try:
        yield Site(f"http://127.0.0.1:{server.server_port}", make_user(*ALL))
    finally:
        settings.ALLOWED_HOSTS = allowed
        server.shutdown()
        server.server_close()
        thread.join(20)
        connections.close_all()


@pytest.fixture
def own_server(databases: None, outbox_settings: Callable[..., None]) -> Iterator[Path]:
    """Both databases on a PostgreSQL of this test's own; returns its data directory."""
    before = {alias: alias_conninfo(alias) for alias in ("default", "broker")}
    with private_postgres() as (data, url):
        try:
            for alias in before:
                point_alias(alias, embedded.create_database(url, f"own_{alias}"))
                call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
            with new_world(outbox_settings):
                yield data
        finally:
            connections.close_all()
            for alias, conninfo in before.items():
                point_alias(alias, conninfo)
