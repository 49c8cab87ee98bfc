"""Schema first, then code: version 0.1 works on while the tables are upgraded under it, and the new code takes over."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import psycopg
import pytest

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.broker.process import run_broker
from outbox.broker.schema.install import SCHEMA_VERSION, check_schema, install
from outbox.errors import SchemaError
from tests.broker.schema import version_0_1
from tests.broker.schema.promise import count, finish, grows
from tests.broker.schema.test_current import catalogue, differing
from tests.broker.support import message
from tests.support import eventually

TEAM = ("sequence", "consume", "produce", "check")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of version 0.1."""
    return version_0_1.unpack(tmp_path_factory.mktemp("version"))


@pytest.fixture
def url(new_database: Callable[..., str], old: Path, tmp_path: Path) -> str:
    """A database with the tables of version 0.1."""
    found = new_database()
    with version_0_1.processes(found, tmp_path) as processes:
        processes.run(old, "setup")
    return found


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_upgrade_under_load(url: str, old: Path, tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    with (
        psycopg.connect(url, autocommit=True) as connection,
        version_0_1.processes(url, logs) as processes,
    ):
        processes.start(old, *TEAM)
        grows(connection, 30)
        assert install(connection, "outbox") == SCHEMA_VERSION
        grows(connection, 30)
        # The old code also starts on the new tables, and installing again with it changes nothing.
        processes.run(old, "setup")
        processes.start(old, *TEAM)
        grows(connection, 30)
        processes.start(version_0_1.ROOT, *TEAM)
        grows(connection, 30)
        processes.stop(path=old)
        grows(connection, 30)
        finish(processes, connection)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_old_code_takes_over_again_on_the_upgraded_tables(url: str, old: Path, tmp_path: Path) -> None:
    """Messages of the new code included, which the old code finds in the log and in the queues."""
    (logs := tmp_path / "logs").mkdir()
    with (
        psycopg.connect(url, autocommit=True) as connection,
        version_0_1.processes(url, logs) as processes,
    ):
        install(connection, "outbox")
        processes.start(version_0_1.ROOT, *TEAM)
        grows(connection, 30)
        # What is under way stays for the old code.
        processes.stop(role="consume")
        processes.stop(role="check")
        processes.stop(role="sequence")
        processes.stop()
        processes.start(old, *TEAM)
        grows(connection, 30)
        finish(processes, connection)


def test_an_upgraded_database_of_version_0_1_has_the_present_schema(url: str, broker_url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection, psycopg.connect(broker_url) as fresh:
        # What its installation declared.
        connection.execute("TRUNCATE outbox.topic, outbox.queue, outbox.subscription RESTART IDENTITY")
        assert install(connection, "outbox") == SCHEMA_VERSION
        assert differing(catalogue(connection), catalogue(fresh)) == []


def test_the_new_code_names_the_command_to_run_on_the_old_tables(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        with pytest.raises(SchemaError, match=r"this code needs .*manage\.py migrate --database"):
            check_schema(connection, "outbox")
    with contextlib.closing(PostgresBroker(BrokerDatabase(url))) as broker:
        with pytest.raises(SchemaError, match=r"manage\.py migrate --database"):
            broker.send([message("versions")])


def test_the_new_broker_process_waits_for_the_tables(url: str, caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    process = threading.Thread(target=run_broker, args=(BrokerDatabase(url), stop))
    process.start()
    try:
        eventually(lambda: "manage.py migrate --database" in caplog.text)
        with psycopg.connect(url, autocommit=True) as connection:
            install(connection, "outbox")
            leader = "SELECT count(*) FROM outbox.leader_lease WHERE owner IS NOT NULL"
            eventually(lambda: count(connection, leader) == 1, what="it leads")
    finally:
        stop.set()
        process.join(20)


def test_released_files_of_the_schema_do_not_change() -> None:
    folder = resources.files("outbox.broker.schema").joinpath("changes")
    for name, expected in version_0_1.SCHEMA_SHA256.items():
        content = folder.joinpath(name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected, f"{name} is released: write a further file"
