"""Which path a publish call takes, when a server has a physical copy: same system identifier, same database name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase, reached_server
from outbox.broker.database.server_identity import marked
from outbox.contrib.django import publish
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.publishing import publish as publish_module
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import (
    BrokerUnavailable,
    OutboxError,
    WrongDatabase,
)
from tests import leftovers
from tests.django.conftest import point_alias
from tests.django.shop.models import Order
from tests.django.state import execute, stored
from tests.servers import copy_cluster

NOWHERE = "postgresql://nobody@127.0.0.1:9/nothing"


@dataclass(frozen=True)
class Twins:
    """A server with a broker and an application in one database, and a copy of its files that runs beside it.

    `either` is the URL of whichever of the two it was led to last, as a virtual address or a pooler would.
    """

    folder: Path
    original: str
    clone: str

    @property
    def either(self) -> str:
        return make_conninfo(self.original, host=str(self.folder / "either"))

    def lead_to(self, url: str) -> None:
        link = self.folder / "either"
        link.unlink(missing_ok=True)
        link.symlink_to(str(conninfo_to_dict(url)["host"]) if url else self.folder / "nobody")

    def restart(self) -> None:
        embedded.stop(self.folder / "a")
        embedded.start(self.folder / "a")


@pytest.fixture(scope="module")
def servers(django_db_setup: None, django_db_blocker: Any) -> Iterator[Twins]:
    with leftovers.server_folder() as folder, django_db_blocker.unblock():
        copy_cluster(folder / "a")
        original = embedded.create_database(embedded.start(folder / "a"), "shop")
        with _pointed(default=original, broker=original):
            call_command("migrate", database="default", run_syncdb=True, verbosity=0)
            install_broker(get_settings())
        embedded.stop(folder / "a")
        _copy(folder / "a", folder / "b")
        try:
            embedded.start(folder / "a")
            yield Twins(folder, original, embedded.database_url(embedded.start(folder / "b"), "shop"))
        finally:
            for data in (folder / "a", folder / "b"):
                embedded.stop(data)


def _copy(original: Path, copy: Path) -> None:
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("postmaster.*"))
    owner = original.stat()
    for path in (copy, *copy.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)


@pytest.fixture
def twins(application: None, servers: Twins) -> Iterator[Twins]:
    """Both empty, and every alias where it was before at the end."""
    for url in (servers.original, servers.clone):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("TRUNCATE shop_order, outbox_ledger, outbox.commit_log, outbox.op_log")
    servers.lead_to(servers.original)
    with _pointed(default=servers.either, broker=servers.original):
        yield servers


@contextlib.contextmanager
def _pointed(**urls: str) -> Iterator[None]:
    before = {alias: dict(connections[alias].settings_dict) for alias in urls}
    for alias, url in urls.items():
        point_alias(alias, url)
    broker_access.reset_broker()
    try:
        yield
    finally:
        broker_access.flush(within_seconds=5)
        broker_access.reset_broker()
        for alias, entry in before.items():
            connections[alias].close()
            for settings in (connections[alias].settings_dict, connections.settings[alias]):
                settings.update(entry)


def order(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {}, key=number)


def orders(url: str) -> list[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        return [row[0] for row in connection.execute("SELECT number FROM shop_order ORDER BY number")]


def sent() -> dict[str, str]:
    """Key -> the path, of what the broker has."""
    return {item.key: "two_phase" if item.half else "atomic" for item in stored()}


def swallowed(expected: type[OutboxError], publishing: Callable[[], object], *, match: str | None = None) -> None:
    """A block whose code continues although its message could not be published."""
    with transaction.atomic():
        with transaction.atomic():
            Order.objects.create(number="without its message")
            with pytest.raises(expected, match=match):
                publishing()


# -- the proof ---------------------------------------------------------------------------------------


def test_a_physical_copy_of_the_brokers_server_is_another_server(twins: Twins) -> None:
    with psycopg.connect(twins.original) as one, psycopg.connect(twins.clone) as other:
        assert reached_server(one) == reached_server(other), "only its name would distinguish the copy"
    order("at home")
    with _pointed(default=twins.clone):
        order("on the copy")
        assert sent() == {"at home": "atomic", "on the copy": "two_phase"}
    assert (orders(twins.original), orders(twins.clone)) == (["at home"], ["on the copy"])


def test_the_alias_of_the_broker_may_lead_two_connections_to_two_servers(
    twins: Twins, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(BROKER="default")
    twins.lead_to(twins.clone)
    connections["default"].ensure_connection()
    twins.lead_to(twins.original)
    swallowed(WrongDatabase, lambda: publish("orders", {}), match="'default'")
    connections["default"].close()
    order("at home")
    assert sent() == {"at home": "atomic"}
    assert (orders(twins.original), orders(twins.clone)) == (["at home"], [])


def test_a_failover_does_not_change_the_path_of_a_running_process(twins: Twins) -> None:
    order("before")
    connections["default"].close()
    twins.lead_to(twins.clone)
    swallowed(WrongDatabase, lambda: publish("orders", {}), match="Nothing was published")
    connections["default"].close()
    twins.lead_to(twins.original)
    order("after")
    assert sent() == {"before": "atomic", "after": "atomic"}
    assert (orders(twins.original), orders(twins.clone)) == (["after", "before"], [])


def test_the_two_phase_path_once_chosen_stays(twins: Twins) -> None:
    twins.lead_to(twins.clone)
    order("on the copy")
    connections["default"].close()
    twins.lead_to(twins.original)
    order("at home")
    assert sent() == {"on the copy": "two_phase", "at home": "two_phase"}


def test_after_a_restart_of_the_server_the_path_is_proven_again_without_an_error(twins: Twins) -> None:
    order("before")
    connections["default"].close()
    twins.restart()
    order("after")
    assert sent() == {"before": "atomic", "after": "atomic"}


def test_after_a_restart_the_proof_needs_the_broker_again(twins: Twins, outbox_settings: Callable[..., None]) -> None:
    """With the alias of the broker: a message after a restart counts only once the path is proven again."""
    outbox_settings(BROKER="default")
    order("before")
    connections["default"].close()
    twins.restart()
    connections["default"].ensure_connection()
    twins.lead_to("")
    swallowed(BrokerUnavailable, lambda: publish("orders", {}))
    twins.lead_to(twins.original)
    order("after")
    assert sent() == {"before": "atomic", "after": "atomic"}
    assert orders(twins.original) == ["after", "before"]


def test_once_proven_a_publish_call_sends_no_further_statement(
    twins: Twins, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(BROKER="default")
    order("first")
    connections["default"].close()
    connections["default"].ensure_connection()
    twins.lead_to("")
    with transaction.atomic(), _commands_on(connections["default"].connection) as commands:
        publish("orders", {}, key="second")
    twins.lead_to(twins.original)
    assert commands == ["BEGIN", "SELECT"]
    assert sent() == {"first": "atomic", "second": "atomic"}


@contextlib.contextmanager
def _commands_on(connection: psycopg.Connection[Any]) -> Iterator[list[str]]:
    """The statements that the client library itself sent on a connection, by the server's answers."""
    with tempfile.TemporaryFile() as trace:
        commands: list[str] = []
        connection.pgconn.trace(trace.fileno())
        try:
            yield commands
        finally:
            connection.pgconn.untrace()
            trace.seek(0)
            lines = [line.split(b"CommandComplete")[1] for line in trace if b"CommandComplete" in line]
            commands += [line.split(b'"')[1].split()[0].decode() for line in lines]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_proof_does_not_depend_on_snapshots(twins: Twins, level: str) -> None:
    with transaction.atomic():
        execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        Order.objects.create(number="at home")
        publish("orders", {}, key="at home")
    assert sent() == {"at home": "atomic"}


def test_the_proof_works_in_a_pipeline(twins: Twins) -> None:
    with transaction.atomic():
        raw = connections["default"].connection
        with raw.pipeline():
            raw.execute("INSERT INTO shop_order (number, status) VALUES ('at home', '')")
            publish("orders", {}, key="at home")
    assert sent() == {"at home": "atomic"}
    assert orders(twins.original) == ["at home"]


# -- one proof for all threads of a process -----------------------------------------------------------


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each proof of this process may take, in the order of the proofs."""
    begun: list[float] = []

    @contextlib.contextmanager
    def slow(database: BrokerDatabase, *, timeout_seconds: float) -> Iterator[int]:
        begun.append(timeout_seconds)
        # Long enough for the other threads to come here too.
        time.sleep(0.3)
        with marked(database, timeout_seconds=timeout_seconds) as key:
            yield key

    monkeypatch.setattr(publish_module, "marked", slow)
    return begun


def _at_once(count: int) -> list[BaseException | None]:
    """The errors of threads that all publish at the same moment."""
    together = threading.Barrier(count)

    def one(number: int) -> None:
        try:
            connections["default"].ensure_connection()
            together.wait(10)
            order(f"{number}")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return [done.exception() for done in [pool.submit(one, number) for number in range(count)]]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_threads_that_publish_at_once_share_one_proof(twins: Twins, proofs: list[float], is_restarted: bool) -> None:
    if is_restarted:
        order("before")
        connections["default"].close()
        twins.restart()
        proofs.clear()
    assert _at_once(8) == [None] * 8
    assert len(proofs) == 1
    assert {sent()[f"{number}"] for number in range(8)} == {"atomic"}


def test_threads_wait_for_a_proof_no_longer_than_for_a_message(
    twins: Twins, proofs: list[float], outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(BROKER="broker", SEND_TIMEOUT_SECONDS=1)
    with publish_module._one_prover(get_settings()):
        [error] = _at_once(1)
    assert isinstance(error, BrokerUnavailable)
    assert "has waited for them for 1 s. Nothing was published" in str(error)
    assert proofs == []
    order("after")
    assert sent() == {"after": "atomic"}
    assert 0 < proofs[0] <= 1


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(twins: Twins) -> None:
    is_held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with publish_module._one_prover(get_settings()):
            is_held.set()
            done.wait(30)

    holding = threading.Thread(target=hold)
    holding.start()
    assert is_held.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0 if publish_module._proving.acquire(blocking=False) else 1)
    done.set()
    holding.join()
    assert os.waitpid(child, 0)[1] == 0


# -- a call that fails takes its block along ----------------------------------------------------------


@pytest.mark.parametrize("alias", ["broker", "default"])
def test_a_broker_that_is_away_when_the_path_is_chosen(
    twins: Twins, outbox_settings: Callable[..., None], alias: str
) -> None:
    outbox_settings(BROKER=alias, SEND_TIMEOUT_SECONDS=0.5)
    connections["default"].ensure_connection()
    point_alias("broker", NOWHERE)
    twins.lead_to("")
    swallowed(BrokerUnavailable, lambda: publish("orders", {}), match="Nothing was published")
    assert orders(twins.original) == []
