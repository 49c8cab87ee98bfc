"""Installing: idempotent, by many at once, in any schema; tables of another age are refused."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema import install as schema_install
from outbox.broker.schema.install import (
    SCHEMA_VERSION,
    check_schema,
    check_server,
    install,
    installed_version,
    locked_tables,
)
from outbox.broker.schema.uninstall import uninstall
from outbox.errors import ConfigurationError, SchemaError
from tests.broker.schema import versions
from tests.broker.support import TOPICS, in_threads, message, new_sequencer
from tests.support import eventually

TABLES = "SELECT relname::text FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'"
LOCKED = """
SELECT relname::text FROM pg_locks JOIN pg_class ON pg_class.oid = relation
WHERE pid = pg_backend_pid() AND relnamespace = 'outbox'::regnamespace AND relkind = 'r'
  AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""


def test_many_install_at_once(new_database: Callable[..., str]) -> None:
    url = new_database()

    def run() -> int:
        with psycopg.connect(url, autocommit=True) as connection:
            return install(connection, "messages")

    assert in_threads([run] * 4) == [SCHEMA_VERSION] * 4
    with psycopg.connect(url, autocommit=True) as connection:
        assert check_schema(connection, "messages") == SCHEMA_VERSION
        assert connection.execute("SELECT count(*) FROM messages.broker").fetchone() == (1,)
        row = connection.execute("SELECT current_setting('search_path')").fetchone()
        assert row is not None and "messages" not in row[0]


def test_two_brokers_in_one_database(new_database: Callable[..., str]) -> None:
    databases = [BrokerDatabase(new_database(), schema=schema) for schema in ("first",)]
    databases.append(BrokerDatabase(databases[0].conninfo, schema="second"))
    for database in databases:
        with contextlib.closing(database.open()) as connection:
            install(connection, database.schema)
            declare_topics(Executor(connection, database.schema), TOPICS)
    for database, count in zip(databases, (1, 2), strict=True):
        broker = PostgresBroker(database)
        broker.send([message() for _ in range(count)])
        with contextlib.closing(database.open()) as connection:
            assert new_sequencer(database).run_once(connection).appended == count
        broker.close()


def test_missing_tables_say_what_to_run(new_database: Callable[..., str]) -> None:
    with psycopg.connect(new_database(), autocommit=True) as connection:
        with pytest.raises(SchemaError, match=r"manage\.py migrate"):
            check_schema(connection, "outbox")


def test_tables_without_a_version(broker_url: str) -> None:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        connection.execute("UPDATE outbox.schema_version SET version = 0")
        with pytest.raises(SchemaError, match="not installed"):
            check_schema(connection, "outbox")


def test_changes_of_later_code_are_accepted(broker_url: str) -> None:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        connection.execute("UPDATE outbox.schema_version SET version = version + 1")
        assert check_schema(connection, "outbox") == install(connection, "outbox") == SCHEMA_VERSION + 1


@pytest.fixture
def old_url(new_database: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with the tables of the present version. The code of this process is that of the next one."""
    url = new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection, "outbox")
    versions.become_next(tmp_path / "schema", monkeypatch)
    return url


def test_a_change_locks_the_tables_that_it_declares(old_url: str) -> None:
    """For no older table does it take a lock that stops readers or writers and was not taken with all the others."""
    found = {}
    with psycopg.connect(old_url, autocommit=True) as connection:
        run, core = Executor(connection, "outbox"), schema_install._files()[0]
        for version in sorted(schema_install._CHANGES):
            with connection.transaction():
                before = {name for (name,) in connection.execute(TABLES.encode()).fetchall()}
                schema_install.apply(run, core, version, core.changes[version])
                locked = {name for (name,) in connection.execute(LOCKED.encode()).fetchall()}
            found[version] = locked & before
    assert found == {version: set(locked_tables(schema_install._CHANGES[version])) for version in found}
    assert found[versions.NEXT] == {"commit_log", "subscription"}


def test_install_gives_up_behind_an_open_transaction(old_url: str) -> None:
    """It names the session, before it tries and in the error, and leaves nothing half done."""
    reports: list[str] = []
    with (
        psycopg.connect(old_url, application_name="the shop") as holder,
        psycopg.connect(old_url, autocommit=True) as connection,
        psycopg.connect(old_url, autocommit=True) as watching,
    ):
        holder.execute("SELECT * FROM outbox.subscription")
        pid = holder.info.backend_pid
        old = "SELECT clock_timestamp() - xact_start > interval '1 second' FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: watching.execute(old, [pid]).fetchone() == (True,))
        with pytest.raises(SchemaError, match="run this command again") as raised:
            install(connection, "outbox", patience_seconds=0.5, report=reports.append)
        named = f"session {pid} \\(the shop\\): idle in transaction, open for [0-9.]+ s, its last statement began at "
        named += "[0-9-]+ [0-9:]+[+-][0-9]{4}, "
        assert re.search(named + "uses .*subscription", reports[0])
        assert re.search(named + "uses .*subscription", str(raised.value))
        # The changes before the one that touches the table are applied, and no part of that one.
        assert installed_version(connection, "outbox") == versions.NEXT - 1
        holder.rollback()
        assert install(connection, "outbox", report=reports.append) == versions.NEXT
    assert len(reports) == 1, "a missing message is not named"


def test_a_prepared_transaction_in_the_way_is_named(old_url: str) -> None:
    with psycopg.connect(old_url, autocommit=True) as connection, psycopg.connect(old_url, autocommit=True) as other:
        other.execute("BEGIN; DELETE FROM outbox.subscription; PREPARE TRANSACTION 'forgotten'")
        try:
            with pytest.raises(SchemaError, match=r"prepared transaction 'forgotten': prepared, open for"):
                install(connection, "outbox", patience_seconds=0.0)
        finally:
            other.execute("ROLLBACK PREPARED 'forgotten'")


@pytest.mark.parametrize("work", [install, uninstall])
def test_no_transaction_is_ended_for_a_change(
    old_url: str, caplog: pytest.LogCaptureFixture, work: Callable[..., object]
) -> None:
    """A transaction uses a table that the change wants, and then one that the change would have locked before."""
    caplog.set_level("DEBUG", "outbox.broker.schema.install")
    waits_for_it = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
    with (
        psycopg.connect(old_url) as running,
        psycopg.connect(old_url, autocommit=True) as connection,
        psycopg.connect(old_url, autocommit=True) as watching,
    ):
        if work is uninstall:
            install(connection, "outbox")
        # In any deadlock, the upgrade is the one that is ended.
        running.execute("SET deadlock_timeout = '1ms'")
        running.commit()
        running.execute("SELECT FROM outbox.subscription")
        pid = running.info.backend_pid

        def is_tried() -> bool:
            waiting = watching.execute(waits_for_it, [pid]).fetchone()
            return waiting == (1,) or len([one for one in caplog.messages if "are still in use" in one]) > 3

        def go_on() -> None:
            eventually(is_tried)
            for table in ("consume_queue", "commit_log", "broker", "dead_letter"):
                running.execute(f"SELECT count(*) FROM outbox.{table}".encode())
            running.commit()

        in_threads([go_on, partial(work, connection, "outbox")])


def test_install_finds_its_gap_among_transactions_that_follow_one_another(old_url: str) -> None:
    """In any order in which an upgrade locks its tables, one of these takes the opposite one; none may fail."""
    stop = threading.Event()

    def work(*tables: str) -> None:
        with psycopg.connect(old_url, autocommit=True, options="-c deadlock_timeout=1ms") as connection:
            while not stop.is_set():
                with connection.transaction():
                    for table in tables:
                        connection.execute(f"SELECT count(*) FROM outbox.{table}".encode())

    def upgrade() -> None:
        try:
            assert install(connection, "outbox") == versions.NEXT
        finally:
            stop.set()

    with psycopg.connect(old_url, autocommit=True) as connection:
        tables = ("consume_queue", "dead_letter", "subscription", "op_log", "pending_check", "commit_log")
        in_threads([upgrade, partial(work, *tables), partial(work, *reversed(tables))])


def test_a_server_that_is_too_old_is_named() -> None:
    for server_version, said in ((140_000, "14.0"), (140_021, "14.21"), (130_004, "13.4")):
        with pytest.raises(
            ConfigurationError, match=rf"PostgreSQL 15 or newer; this server is {said}: upgrade the server"
        ):
            check_server(server_version)
    for server_version in (150_000, 150_004, 160_000, 180_001):
        check_server(server_version)


def test_the_server_is_looked_at_before_its_tables(
    new_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of the tests, to a version of the broker that needs a newer one."""
    monkeypatch.setattr(schema_install, "MINIMUM_POSTGRESQL", 99)
    url = new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        for work in (install, check_schema):
            with pytest.raises(ConfigurationError, match="PostgreSQL 99 or newer"):
                work(connection, "outbox")
        assert connection.execute("SELECT to_regnamespace('outbox')").fetchone() == (None,)
    with contextlib.closing(PostgresBroker(BrokerDatabase(url))) as broker:
        with pytest.raises(ConfigurationError, match="PostgreSQL 99 or newer"):
            broker.send([message()])


def test_declaring_topics_is_idempotent_and_safe_at_once(broker_url: str) -> None:
    database = BrokerDatabase(broker_url)

    def declare(number: int) -> None:
        with contextlib.closing(database.open()) as connection:
            declare_topics(Executor(connection, "outbox"), TOPICS if number % 2 else TOPICS[::-1])

    in_threads([partial(declare, number) for number in range(6)])
    with contextlib.closing(database.open()) as connection:
        rows = connection.execute(
            "SELECT name, t.layout, count(*) FROM outbox.topic t JOIN outbox.queue USING (topic_id)"
            " GROUP BY name, t.layout ORDER BY name"
        ).fetchall()
        expected = [(topic.name, 1, topic.queue_count) for topic in sorted(TOPICS, key=lambda topic: topic.name)]
        assert rows == expected
