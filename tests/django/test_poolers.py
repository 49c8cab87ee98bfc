"""PgBouncer in transaction mode between every process and both databases, with prepared statements and without."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import connections, transaction
from psycopg.conninfo import make_conninfo

from outbox.broker.operations.conditions import Severity
from outbox.broker.process import run_broker
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import alias_conninfo, broker_database
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.operations.doctor import examine
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker import probes
from outbox.message import Delivery
from tests import pooler
from tests.django import entry_points
from tests.django.conftest import BROKER_TEMPLATE, OF_THE_APPLICATION, Cleaner, point_alias
from tests.django.operators import ALL, client_of, make_user
from tests.django.processes import process
from tests.django.sessions import close_sessions
from tests.django.shop.models import Effect, Order
from tests.django.state import postgres_broker, stored
from tests.django.support import sequence
from tests.django.test_crash_workers import assert_nothing_is_wrong, expected, settled, work
from tests.django.test_crash_workers import effects as effects_so_far
from tests.django.test_worker import _children as children
from tests.documents import DOCS, blocks
from tests.part_apps import has
from tests.pooler import EVERY_VERSION, VERSIONS, KitPooler, Pooler, Version
from tests.runbooks.machine import binaries
from tests.support import eventually

OLD = VERSIONS["old"]
pytestmark = pytest.mark.usefixtures("no_subscribers")


@contextlib.contextmanager
def behind(server_url: str, version: Version, *, size: int = 4, logins: Collection[str] = ()) -> Iterator[Pooler]:
    """Lead both aliases of this process, and of those it starts, through a pooler; the database names stay."""
    with (
        tempfile.TemporaryDirectory(prefix="outbox-pool-") as folder,
        pooler.running(server_url, Path(folder), size=size, version=version, logins=logins) as running,
        _leading_to({alias: {"HOST": folder, "PORT": "6432"} for alias in ("default", "broker")}),
    ):
        yield running


@contextlib.contextmanager
def _leading_to(addresses: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """Change the entries of aliases in DATABASES, and connect anew before and after."""
    with pytest.MonkeyPatch.context() as patch:
        _connect_anew()
        for alias, address in addresses.items():
            for settings in (connections[alias].settings_dict, connections.settings[alias]):
                for key, value in address.items():
                    patch.setitem(settings, key, value)
        try:
            yield
        finally:
            _connect_anew()


def pooled(running: Pooler, alias: str) -> str:
    """The URL of the database of an alias through the pooler."""
    return make_conninfo(running.url, dbname=connections[alias].settings_dict["NAME"])


def _connect_anew() -> None:
    broker_access.flush(within_seconds=5)
    broker_access.reset_broker()
    connections.close_all()
    # From 1.23 on, PgBouncer ends after its last client.
    close_sessions()


@pytest.fixture
def effects() -> Callable[[], list[str]]:
    """Subscribe to orders; a function that names the effects."""

    @subscriber("orders", group="effects", using="default")
    def effect(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)

    return lambda: sorted(Effect.objects.values_list("number", flat=True))


def place(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {"number": number}, key=number)


@pytest.mark.skipif(OLD.program is None, reason="PgBouncer is not installed")
def test_publish_sequence_and_consume(
    path: str, server_url: str, outbox_settings: Callable[..., None], effects: Callable[[], list[str]]
) -> None:
    """Every step on connections of its own, which meet what the ones before have left on the pool's."""
    outbox_settings(LISTEN_URL="")
    with behind(server_url, OLD, size=2):
        for number in range(3):
            broker_access.reset_broker()
            place(f"n{number}")
            sequence()
            worked, counts = entry_points.say("a consumer")
            assert worked
            assert effects() == [f"n{one}" for one in range(number + 1)], counts
    assert {one.decision for one in stored()} == {"C"}


@pytest.mark.parametrize("version", EVERY_VERSION[:2])
def test_the_file_of_the_deployment_kit(
    version: Version,
    databases: None,
    server_url: str,
    outbox_settings: Callable[..., None],
    effects: Callable[[], list[str]],
) -> None:
    """The page's command writes the secrets, both databases ask for them, and only LISTEN goes around the pooler."""
    aliases = {"shop": "default", "broker": "broker"}
    names = {name: str(connections[alias].settings_dict["NAME"]) for name, alias in aliases.items()}
    [command] = [code for code in blocks(DOCS / "operations" / "connections.md", "sh") if "userlist.txt" in code]
    with (
        tempfile.TemporaryDirectory(prefix="outbox-pool-") as folder,
        pooler.login_with_password(server_url) as (user, password),
    ):
        programs = {"PATH": f"{binaries()}{os.pathsep}{os.environ['PATH']}", "ADMIN_URL": server_url}
        command = command.replace("/etc/pgbouncer/", f"{folder}/")
        subprocess.run(["bash", "-euc", command], env={**os.environ, **programs}, check=True)
        users = Path(folder, "userlist.txt")
        assert users.stat().st_mode & 0o777 == 0o600, "it has secrets"
        straight = make_conninfo(alias_conninfo("broker"), user=user, password=password)
        outbox_settings(LISTEN_URL=straight)
        pool = KitPooler(server_url, Path(folder), databases=names, user=user, password=password, version=version)
        address = {"HOST": "127.0.0.1", "PORT": str(pool.port), "USER": user, "PASSWORD": password}
        # The page's command runs as the user who runs PgBouncer.
        shutil.chown(users, pool.user)
        pool.start()
        try:
            with _leading_to({alias: {**address, "NAME": name} for name, alias in aliases.items()}):
                place("n1")
                sequence()
                worked, counts = entry_points.say("a consumer")
                assert worked and effects() == ["n1"], counts
                assert [one.decision for one in stored()] == ["C"]
                said = [one for one in examine() if "not examined behind a pooler" in one.meaning]
                assert [(one.name, one.severity) for one in said] == [("sessions of workers", Severity.OK)]
        finally:
            pool.stop()
        assert [name for name in names if f"db={name} user={user}" not in pool.log()] == []


@pytest.mark.skipif(OLD.program is None, reason="PgBouncer is not installed")
@pytest.mark.parametrize("listen", ["", None], ids=["named", "found-out"])
def test_nothing_is_left_on_the_connections_of_the_pool(
    listen: str | None,
    databases: None,
    server_url: str,
    outbox_settings: Callable[..., None],
    effects: Callable[[], list[str]],
) -> None:
    """A setting of a session is seen by the next client of the pool."""
    outbox_settings(LISTEN_URL=listen)
    with behind(server_url, OLD, size=2) as pool:
        url = pooled(pool, "broker")
        # Both connections of the pool at once.
        with psycopg.connect(url) as one, psycopg.connect(url) as other:
            before = _sessions(one, other)
            for number in range(3):
                place(f"n{number}")
                sequence()
                for entry_point in ("outbox_status", "outbox_doctor", "a consumer"):
                    entry_points.say(entry_point)
                # It leads for a moment, with the maintenance and the summary.
                stop = threading.Event()
                process = threading.Thread(target=run_broker, args=[broker_database(), stop])
                process.start()
                eventually(lambda: "no_sequencer" not in {one.name for one in look().verdict.conditions})
                stop.set()
                process.join()
                assert _sessions(one, other) == before


def _sessions(*connections: psycopg.Connection[Any]) -> list[list[tuple[Any, ...]]]:
    """The settings of each connection's session, once each has begun a transaction."""
    state = """
        SELECT 'setting', name, setting FROM pg_settings WHERE source = 'session' AND name <> 'application_name'
        UNION ALL SELECT 'prepared', name, statement FROM pg_prepared_statements
        UNION ALL SELECT 'listens', channel, '' FROM pg_listening_channels() AS channel
        ORDER BY 1, 2
    """
    found = [connection.execute(state).fetchall() for connection in connections]
    for connection in connections:
        connection.commit()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", EVERY_VERSION)
def test_requests_without_waiting(
    version: Version, databases: None, server_url: str, outbox_settings: Callable[..., None]
) -> None:
    """Wake-ups and ends are pipelined, many on their way at once, from several threads at a time."""
    outbox_settings(LISTEN_URL="")
    numbers = iter(range(400))
    lock = threading.Lock()

    def publish_some() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                connections.close_all()
                return
            place(f"n{number}")

    with behind(server_url, version, size=8):
        place("first")
        threads = [threading.Thread(target=publish_some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # None is lost: no check-back runs here.
        assert {one.decision for one in stored()} == {"C"}
        assert postgres_broker()._one_way.dropped == 0
    assert len(stored()) == 401


def _said(*, rounds: int) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for _ in range(rounds):
        for entry_point in entry_points.ENTRY_POINTS:
            done, said = entry_points.say(entry_point)
            assert "prepared statement" not in said, f"{entry_point}: {said}"
            found.append((entry_point, done))
        broker_access.reset_broker()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", EVERY_VERSION)
def test_every_entry_point_works_as_without_one(
    version: Version,
    databases: None,
    cleaners: dict[str, Cleaner],
    server_url: str,
    new_database: Callable[..., str],
    outbox_settings: Callable[..., None],
    effects: Callable[[], list[str]],
) -> None:
    outbox_settings(LISTEN_URL="")
    directly = _said(rounds=2)
    # A new broker knows no message of the ledger's rows.
    connections.close_all()
    cleaners["default"].delete(*OF_THE_APPLICATION, truncated="outbox_ledger")
    point_alias("broker", new_database(template=BROKER_TEMPLATE))
    with behind(server_url, version):
        assert _said(rounds=2) == directly


# Both paths with the old version; the new one meets each of them with one of its settings.
_PATHS = [
    pytest.param(*one.values, broker, id=f"{one.id}-{broker}", marks=one.marks)
    for one, broker in [
        (EVERY_VERSION[0], "default"),
        *zip(EVERY_VERSION, ("broker", "broker", "default"), strict=True),
    ]
]
PAGES = ("", "dead-letters/", "messages/", "groups/", "topics/", "undecided/", "waiting/", "incidents/")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("version", "broker"), _PATHS)
def test_worker_page_and_kills(
    version: Version, broker: str, databases: None, server_url: str, outbox_settings: Callable[..., None]
) -> None:
    """Both paths. Killed: every process of the worker, and the pooler itself."""
    outbox = {"LISTEN_URL": "", "BROKER": broker}
    outbox_settings(**outbox)
    with behind(server_url, version, size=12) as pool:
        if broker == "default":
            with connections["default"].cursor() as cursor:
                # With what other tests have left there.
                cursor.execute("DROP SCHEMA IF EXISTS outbox CASCADE")
            install_broker(get_settings())
        with process(["-m", "django", "outbox_worker"], outbox=outbox, quiet=True) as worker:
            work(range(8))
            eventually(settled, within_seconds=60, what=_state)
            for pid in children(worker.pid):
                os.kill(pid, signal.SIGKILL)
            work(range(8, 16))
            eventually(settled, within_seconds=60, what=_state)
            pool.stop(signal.SIGKILL)
            pool.start()
            # As at the beginning of a request.
            connections.close_all()
            work(range(16, 24))
            eventually(settled, within_seconds=60, what=_state)
            eventually(lambda: look().verdict.conditions == [], within_seconds=30, what=_state)
            assert entry_points.say("outbox_status")[0]
            client = client_of(make_user(*ALL))
            for page in PAGES if has("console") else ():
                assert client.get(f"/outbox/{page}").status_code == 200, page
            User.objects.all().delete()
    assert_nothing_is_wrong()


def _state() -> str:
    return f"{look()}\nmissing {expected() - effects_so_far()}, too many {effects_so_far() - expected()}"


@pytest.mark.slow
@pytest.mark.parametrize("straight", [True, False], ids=["listens", "finds-out"])
@pytest.mark.skipif(OLD.program is None, reason="PgBouncer is not installed")
def test_a_worker_with_a_direct_url_and_without_any(
    straight: bool, databases: None, server_url: str, outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    """With a URL for LISTEN it sequences on a session that lasts; without any setting it finds the pooler and polls.

    Either one is not ready while the pooler is down.
    """
    outbox = {"LISTEN_URL": alias_conninfo("broker") if straight else None, "HEALTH_DIRECTORY": str(tmp_path)}
    outbox_settings(**outbox)
    with behind(server_url, OLD, size=12) as pool:
        with process(["-m", "django", "outbox_worker"], outbox=outbox, quiet=True) as worker:
            work(range(8))
            eventually(settled, within_seconds=60, what=_state)
            assert probes.ready().is_healthy
            pool.stop(signal.SIGKILL)
            eventually(lambda: not probes.ready().is_healthy, within_seconds=30)
            assert probes.live().is_healthy
            for pid in children(worker.pid):
                os.kill(pid, signal.SIGKILL)
            pool.start()
            connections.close_all()
            work(range(8, 16))
            eventually(settled, within_seconds=60, what=_state)
            eventually(lambda: look().verdict.conditions == [], within_seconds=30, what=_state)
            eventually(lambda: probes.ready().is_healthy, within_seconds=30)
    assert probes.live().problems == ["the worker on this machine has ended"]
    assert_nothing_is_wrong()
