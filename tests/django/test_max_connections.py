"""A worker with fourteen groups keeps within a server with max_connections=100, also when others fill this server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections, transaction
from psycopg.conninfo import make_conninfo

from outbox.broker import embedded
from outbox.contrib.django import publish
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from tests.django.conftest import point_alias
from tests.django.fourteen import GROUPS
from tests.django.processes import process
from tests.django.shop.models import Effect
from tests.django.support import ended
from tests.support import eventually

REFUSALS = ("too many clients", "remaining connection slots", "too many connections")


@dataclass
class Shop:
    """A shop on a server of its own, with one database and an ordinary role."""

    data: Path
    admin: psycopg.Connection[Any]
    url: str

    @property
    def refused(self) -> list[str]:
        """The lines of the server's log about refused connections."""
        lines = (self.data / "log").read_text().splitlines()
        return [line for line in lines if any(text in line for text in REFUSALS)]

    def sessions(self) -> list[str]:
        """The names of the role's sessions, without that of this process."""
        rows = self.admin.execute(
            "SELECT application_name FROM pg_stat_activity WHERE usename = 'shop' AND pid <> %s", [self.own]
        ).fetchall()
        return [name for (name,) in rows]

    def names(self) -> set[str]:
        """The names of the role's sessions."""
        rows = self.admin.execute("SELECT application_name FROM pg_stat_activity WHERE usename = 'shop'").fetchall()
        return {name for (name,) in rows}

    @property
    def own(self) -> int:
        connections["default"].ensure_connection()
        return int(connections["default"].connection.info.backend_pid)

    def order(self, *keys: str) -> None:
        for key in keys:
            with transaction.atomic():
                publish("orders", {}, key=key)
        assert flush(within_seconds=30)

    def effects(self) -> Counter[tuple[str, str]]:
        """How often each group has handled each key."""
        found = Effect.objects.filter(number__startswith="group").values_list("number", flat=True)
        return Counter((number.split()[0], number.split()[1]) for number in found)

    def used_attempts(self) -> int:
        [[count]] = self.admin.execute("SELECT count(*) FROM outbox.failure").fetchall()
        return int(count)

    @contextlib.contextmanager
    def worker(self, log: Path) -> Iterator[subprocess.Popen[str]]:
        """A whole worker, with the default number of processes and threads."""
        variables = {"TEST_APPS": "tests.django.fourteen"}
        arguments = ["-m", "django", "outbox_worker"]
        default = {"CONN_MAX_AGE": 0}
        with process(arguments, outbox={"BROKER": "default"}, default=default, variables=variables, log=log) as started:
            yield started

    def status(self) -> dict[str, Any]:
        # This process keeps its engine, because it publishes while the server is full.
        with mock.patch("outbox.contrib.django.management.output.reset_broker"):
            _, said = ended("outbox_status", "--json")
        return {one["name"]: one for one in json.loads(said)["conditions"]}

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Idle sessions of another role take every place that is left."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    url = make_conninfo(self.url, user="other")
                    stack.enter_context(contextlib.closing(psycopg.connect(url, autocommit=True)))
            yield


@pytest.fixture
def shop(
    databases: None,
    no_subscribers: None,
    tmp_path_factory: pytest.TempPathFactory,
    outbox_settings: Callable[..., None],
) -> Iterator[Shop]:
    data = tmp_path_factory.mktemp("full") / "data"
    before = {alias: dict(connections[alias].settings_dict) for alias in ("default", "broker")}
    server = embedded.start(data, settings={"max_connections": "100"})
    try:
        with psycopg.connect(server, autocommit=True) as connection:
            for role in ("shop", "other"):
                connection.execute(f"CREATE ROLE {role} LOGIN")
            connection.execute("CREATE DATABASE shop OWNER shop")
        url = make_conninfo(server, dbname="shop", user="shop")
        for alias in ("default", "broker"):
            point_alias(alias, url)
        outbox_settings(BROKER="default")
        reset_broker()
        call_command("migrate", database="default", run_syncdb=True, verbosity=0)
        install_broker(get_settings())
        with psycopg.connect(make_conninfo(server, dbname="shop"), autocommit=True) as admin:
            yield Shop(data, admin, url)
    finally:
        reset_broker()
        connections.close_all()
        for alias, entry in before.items():
            for settings in (connections[alias].settings_dict, connections.settings[alias]):
                settings.update(entry)
        embedded.stop(data)


def children(parent: int) -> dict[int, str]:
    """The processes of a worker, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.mark.slow
def test_fourteen_groups_with_default_settings_stay_within_the_server(shop: Shop, tmp_path: Path) -> None:
    chance = random.Random(41)
    keys: list[str] = []
    peak: list[str] = []
    said = lambda: (tmp_path / "log").read_text()[-3000:]  # noqa: E731
    with shop.worker(tmp_path / "log") as worker:
        # Without a kill: the figure of the documents.
        keys += [f"a{number}" for number in range(40)]
        shop.order(*keys)
        # The sessions of this process do not count.
        reset_broker()

        def all_handled() -> bool:
            nonlocal peak
            peak = max(peak, shop.sessions(), key=len)
            return len(shop.effects()) == len(GROUPS) * len(keys)

        eventually(all_handled, within_seconds=60, what=said)
        assert 8 < len(peak) <= 15, Counter(peak)
        for turn in range(3):
            more = [f"b{turn}.{number}" for number in range(30)]
            keys += more
            shop.order(*more[:15])
            if turn == 1:
                shop.admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'")
                connections.close_all()
            else:
                victims = [pid for pid, line in children(worker.pid).items() if "worker.child" in line]
                os.kill(chance.choice(victims), signal.SIGKILL)
            shop.order(*more[15:])
            eventually(all_handled, within_seconds=60, what=said)
    assert shop.refused == []
    handled = shop.effects()
    assert set(handled) == {(group, key) for group in GROUPS for key in keys}
    # Only a group without the inbox may handle a message twice after a kill.
    assert {group for (group, _), count in handled.items() if count > 1} <= {GROUPS[12]}


@pytest.mark.slow
def test_a_worker_waits_while_the_server_is_full(shop: Shop, tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = lambda: log.read_text()[-3000:]  # noqa: E731
    shop.order("before")
    with shop.worker(log):
        eventually(lambda: len(shop.effects()) == len(GROUPS), within_seconds=60, what=said)
    with contextlib.ExitStack() as stack:
        # The worker starts while the server is full.
        with shop.full():
            assert shop.status()["connections_refused"]["severity"] == "critical"
            stack.enter_context(shop.worker(log))
            eventually(lambda: "refuses another connection" in log.read_text(), within_seconds=30)
            shop.order("starting")
            assert len(shop.effects()) == len(GROUPS)
        eventually(lambda: len(shop.effects()) == 2 * len(GROUPS), within_seconds=60, what=said)
    # It is full while the worker runs: its handlers have no session yet, and get none.
    with shop.worker(log):
        eventually(
            lambda: shop.names() >= {"outbox-consumer", "outbox-coordinator", "outbox-broker"}, within_seconds=30
        )
        with shop.full():
            shop.order("running")
            eventually(
                lambda: shop.admin.execute("SELECT 1 FROM outbox.outage").fetchall(), within_seconds=30, what=said
            )
            assert "connections_refused" in shop.status()
            assert len(shop.effects()) < 3 * len(GROUPS)
        eventually(lambda: len(shop.effects()) == 3 * len(GROUPS), within_seconds=60, what=said)
        eventually(lambda: "connections_refused" not in shop.status(), within_seconds=30)
    assert shop.used_attempts() == 0
    numbers = Effect.objects.filter(number__startswith="group").values_list("number", flat=True)
    assert {number.split()[2] for number in numbers} == {"1"}
    assert set(shop.effects().values()) == {1}
