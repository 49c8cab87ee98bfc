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

from outbox.broker.database import BrokerDatabase
from outbox.broker.install import SCHEMA_VERSION, check_schema, install
from outbox.broker.postgres import PostgresBroker
from outbox.broker.process import run_broker
from outbox.broker.status import broker_status
from outbox.errors import SchemaError
from tests.broker import version_0_1
from tests.broker.support import assert_gapless, message
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


def _count(connection: psycopg.Connection[tuple[int]], statement: str) -> int:
    row = connection.execute(statement.encode()).fetchone()
    assert row is not None
    return row[0]


def _grows(connection: psycopg.Connection[tuple[int]], by: int) -> None:
    """Wait until that many more messages have had their effect, on both paths."""
    statement = "SELECT count(*) FROM effect JOIN business USING (message_id) WHERE path = '{}'"
    for path in ("atomic", "two-phase"):
        one = statement.format(path)
        goal = _count(connection, one) + by
        eventually(lambda one=one, goal=goal: _count(connection, one) >= goal, within_seconds=60, what=path)  # type: ignore[misc]


@pytest.mark.timeout(300)
def test_upgrade_under_load(url: str, old: Path, tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    with (
        psycopg.connect(url, autocommit=True) as connection,
        version_0_1.processes(url, logs) as processes,
    ):
        processes.start(old, *TEAM)
        _grows(connection, 30)
        assert install(connection, "outbox") == SCHEMA_VERSION
        _grows(connection, 30)
        # The old code also starts on the new tables, and installing again with it changes nothing.
        processes.run(old, "setup")
        processes.start(old, *TEAM)
        _grows(connection, 30)
        processes.start(version_0_1.ROOT, *TEAM)
        _grows(connection, 30)
        processes.stop(path=old)
        _grows(connection, 30)
        processes.stop(role="produce")
        eventually(
            lambda: (
                _count(connection, "SELECT count(*) FROM business") == _count(connection, "SELECT count(*) FROM effect")
            ),
            within_seconds=60,
            what="every order has its effect",
        )
        processes.stop(role="consume")
        eventually(lambda: not _undecided(connection), within_seconds=60, what="all halves are decided")
        processes.stop(role="check")
        _assert_promise_kept(connection)
        processes.stop()


def _undecided(connection: psycopg.Connection[tuple[int]]) -> int:
    return _count(
        connection,
        "SELECT count(*) FROM outbox.commit_log log WHERE half"
        " AND NOT EXISTS (SELECT FROM outbox.op_log op WHERE op.transaction_id = log.transaction_id)",
    )


def _assert_promise_kept(connection: psycopg.Connection[tuple[int]]) -> None:
    differing = (
        "SELECT count(*) FROM (SELECT message_id FROM business) b FULL JOIN ({}) o USING (message_id)"
        " WHERE b.message_id IS NULL OR o.message_id IS NULL"
    )
    assert _count(connection, differing.format("SELECT message_id FROM effect")) == 0
    queued = "SELECT message_id FROM outbox.consume_queue JOIN outbox.commit_log USING (log_id) WHERE attempt = 0"
    assert _count(connection, differing.format(queued)) == 0
    doubled = "SELECT count(*) FROM (SELECT log_id FROM outbox.consume_queue GROUP BY log_id HAVING count(*) > 1) d"
    assert _count(connection, doubled) == 0
    assert_gapless(connection)
    assert broker_status(connection).problems == []


def test_the_new_code_says_what_to_run_on_the_old_tables(url: str) -> None:
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
            eventually(lambda: _count(connection, leader) == 1, what="it leads")
    finally:
        stop.set()
        process.join(20)


def test_released_files_of_the_schema_do_not_change() -> None:
    folder = resources.files("outbox.broker").joinpath("schema")
    for name, expected in version_0_1.SCHEMA_SHA256.items():
        content = folder.joinpath(name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected, f"{name} is released: write a further file"
