"""Schema first, then code: the present code works on while the next version upgrades the tables under it, and then the
next version's code takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import SCHEMA_VERSION, check_schema, install, installed_version
from outbox.errors import SchemaError
from tests.broker.schema import versions
from tests.broker.schema.promise import count, finish, grows
from tests.broker.schema.test_current import catalogue, differing
from tests.broker.support import TOPICS, half, message
from tests.support import eventually

TEAM = ("sequence", "consume", "produce", "check")
OLD = versions.ROOT
FILLED = "SELECT count(*) FROM outbox.commit_log WHERE stored_by = 'append_one'"


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the next version."""
    return versions.make_next(tmp_path_factory.mktemp("version"))


@pytest.fixture
def url(new_database: Callable[..., str], tmp_path: Path) -> str:
    """A database with the tables of the present version, and the application's."""
    found = new_database()
    with versions.processes(found, tmp_path) as processes:
        processes.run(OLD, "setup")
    return found


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_upgrade_under_load(url: str, new: Path, tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    with psycopg.connect(url, autocommit=True) as connection, versions.processes(url, logs) as processes:
        processes.start(OLD, *TEAM)
        grows(connection, 30)
        assert count(connection, "SELECT version FROM outbox.schema_version WHERE name = 'core'") == SCHEMA_VERSION
        processes.run(new, "upgrade", "upgrade")
        assert count(connection, "SELECT version FROM outbox.schema_version WHERE name = 'core'") == versions.NEXT
        grows(connection, 30)
        # Only old code has published so far: it calls the changed function.
        assert count(connection, FILLED) > 0
        # The old code also starts on the new tables, and installing again with it changes nothing.
        processes.run(OLD, "setup")
        processes.start(OLD, *TEAM)
        grows(connection, 30)
        processes.start(new, *TEAM)
        grows(connection, 30)
        processes.stop(path=OLD)
        grows(connection, 30)
        finish(processes, connection)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_old_code_takes_over_again_on_the_upgraded_tables(url: str, new: Path, tmp_path: Path) -> None:
    """Messages of the new code included, which the old code finds in the log and in the queues."""
    (logs := tmp_path / "logs").mkdir()
    with psycopg.connect(url, autocommit=True) as connection, versions.processes(url, logs) as processes:
        processes.run(new, "upgrade")
        processes.start(new, *TEAM)
        grows(connection, 30)
        # What is under way stays for the old code.
        processes.stop(role="consume")
        processes.stop(role="check")
        processes.stop(role="sequence")
        processes.stop()
        processes.start(OLD, *TEAM)
        grows(connection, 30)
        finish(processes, connection)


def test_a_killed_upgrade_is_finished_by_the_next_one(
    broker_url: str, new: Path, tmp_path: Path, new_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its two changes. The result is that of a new installation."""
    (logs := tmp_path / "logs").mkdir()
    with (
        psycopg.connect(broker_url) as holder,
        psycopg.connect(broker_url, autocommit=True) as connection,
        versions.processes(broker_url, logs) as processes,
    ):
        holder.execute("SELECT FROM outbox.subscription")
        processes.start(new, "upgrade")
        eventually(lambda: installed_version(connection) == versions.NEXT - 1, what="the first change")
        processes.kill()
        # The old code works on the tables of an upgrade that is not finished.
        assert check_schema(connection, "outbox") == versions.NEXT - 1
        holder.rollback()
        processes.run(new, "upgrade")
        versions.become_next(tmp_path / "schema", monkeypatch)
        with psycopg.connect(new_database(), autocommit=True) as fresh:
            assert install(fresh, "outbox") == versions.NEXT
            assert differing(catalogue(connection), catalogue(fresh)) == []


def test_the_old_code_publishes_on_the_upgraded_tables(
    broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        with monkeypatch.context() as patch:
            versions.become_next(tmp_path / "schema", patch)
            declare_topics(Executor(connection, "outbox"), TOPICS)
            assert install(connection, "outbox") == versions.NEXT
        assert install(connection, "outbox") == check_schema(connection, "outbox") == versions.NEXT > SCHEMA_VERSION
        with contextlib.closing(PostgresBroker(BrokerDatabase(broker_url))) as broker:
            broker.send([message()])
            broker.send_half(half())
        assert count(connection, FILLED) == 2
        assert count(connection, "SELECT count(*) FROM outbox.commit_log") == 2


def test_the_new_code_names_the_command_to_run_on_the_old_tables(
    broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.become_next(tmp_path / "schema", monkeypatch)
    with psycopg.connect(broker_url, autocommit=True) as connection:
        with pytest.raises(SchemaError, match=rf"version {SCHEMA_VERSION} .* needs version {versions.NEXT} of them"):
            check_schema(connection, "outbox")
    with contextlib.closing(PostgresBroker(BrokerDatabase(broker_url))) as broker:
        with pytest.raises(SchemaError, match=r"manage\.py migrate --database"):
            broker.send([message()])


def test_a_change_can_refuse_the_code_before_it(
    broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        with monkeypatch.context() as patch:
            folder = tmp_path / "schema"
            versions.become_next(folder, patch)
            last = folder / "changes" / f"{versions.NEXT:04}_next.sql"
            raised = f"UPDATE schema_version SET minimum_code = {versions.NEXT} WHERE name = 'core';\n"
            last.write_text(f"{last.read_text()}{raised}")
            assert install(connection, "outbox") == check_schema(connection, "outbox") == versions.NEXT
        for work in (check_schema, install):
            with pytest.raises(
                SchemaError, match=rf"need code of at least version {versions.NEXT}.*upgrade the package"
            ):
                work(connection, "outbox")
