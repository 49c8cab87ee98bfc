"""The broker's process: leaders and their replacement, wake-ups and their loss, restarts, restores."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.broker.sequencer.leader_lease import LeaderLease
from outbox.utils.ids import uuid7
from tests.broker.support import assert_gapless, message, process, queued_ids
from tests.support import eventually


def _all_queued(connection: BrokerConnection, sent: list[object]) -> Callable[[], bool]:
    return lambda: sorted(queued_ids(connection)) == sorted(sent)  # type: ignore[type-var]


@pytest.mark.parametrize("listen", ["", None])
def test_a_lost_notification_is_made_up_for_by_polling(
    database: BrokerDatabase, connection: BrokerConnection, listen: str | None
) -> None:
    deaf = BrokerDatabase(database.conninfo, listen_conninfo=listen)
    with process(deaf):
        eventually(lambda: _leader(connection))
        # Stored without any announcement.
        [receipt] = commit_log.append_decided(Executor(connection, "outbox"), TopicCatalog(), [message()])
        eventually(lambda: queued_ids(connection) == [receipt.message_id], within_seconds=5)


def _leader(connection: BrokerConnection) -> object:
    row = connection.execute(
        "SELECT owner FROM outbox.leader_lease WHERE expires_at > clock_timestamp() AND role = 'sequencer'"
    ).fetchone()
    return row and row[0]


_CHILD = """
import sys, threading
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.process import run_broker
run_broker(BrokerDatabase(sys.argv[1]), threading.Event())
"""


@contextlib.contextmanager
def _child(database: BrokerDatabase) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, database.conninfo], stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_dead_leader_is_replaced_within_a_lease_term(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    with _child(database) as leading:
        first = eventually(lambda: _leader(connection))
        with process(database):
            leading.send_signal(signal.SIGKILL)
            leading.wait()
            died = time.monotonic()
            [receipt] = broker.send([message()])
            eventually(lambda: queued_ids(connection) == [receipt.message_id])
            # The term is 3 s; the rest is for a busy machine.
            assert time.monotonic() - died < 3.0 + 2.0
            assert _leader(connection) != first


def test_a_leader_that_ends_is_replaced_at_once(database: BrokerDatabase, connection: BrokerConnection) -> None:
    with process(database):
        eventually(lambda: _leader(connection))
    assert _leader(connection) is None


def test_a_lease_is_exclusive_renewed_and_fenced(database: BrokerDatabase, connection: BrokerConnection) -> None:
    first = LeaderLease("outbox", uuid7(), term_seconds=0.5)
    second = LeaderLease("outbox", uuid7(), term_seconds=0.5)
    assert first.acquire_or_renew(connection) == 0.0
    remaining = second.acquire_or_renew(connection)
    assert 0 < remaining <= 0.5
    assert eventually(lambda: second.acquire_or_renew(connection) == 0.0, within_seconds=3)
    assert first.acquire_or_renew(connection) > 0
    assert connection.execute("SELECT epoch FROM outbox.leader_lease").fetchone() == (2,)


def test_reconnect_after_pg_terminate_backend(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sent: list[object] = []
    with process(database):
        for _ in range(5):
            sent.append(broker.send([message()])[0].message_id)
            eventually(_all_queued(connection, sent))
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'outbox-broker'"
            )
    assert_gapless(connection)


def test_the_process_waits_for_its_tables(new_database: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    database = BrokerDatabase(new_database())
    name = conninfo_to_dict(database.conninfo)["dbname"]
    with process(database), contextlib.closing(database.open()) as connection:
        eventually(lambda: f"not installed in schema 'outbox' of the database {name!r}" in caplog.text)
        install(connection)
        eventually(lambda: _leader(connection))


def test_an_idle_process_looks_once_a_second(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection, tmp_path: Path
) -> None:
    with (tmp_path / "protocol").open("w+") as protocol:

        class Traced(BrokerDatabase):
            def open(
                self, *, timeout_seconds: float = 3.0, name: str = "outbox", direct: bool = False
            ) -> BrokerConnection:
                found = super().open(timeout_seconds=timeout_seconds, name=name, direct=direct)
                found.pgconn.trace(protocol.fileno())
                return found

        with process(Traced(database.conninfo)):
            # It has taken over and looked around when it has queued something.
            [receipt] = broker.send([message()])
            eventually(lambda: queued_ids(connection) == [receipt.message_id])
            looks, round_trips, started = _looks(tmp_path), _round_trips(tmp_path), time.monotonic()
            eventually(lambda: _looks(tmp_path) >= looks + 6)
            looks, round_trips = _looks(tmp_path) - looks, _round_trips(tmp_path) - round_trips
            seconds = time.monotonic() - started
    # Two more for the message that has just arrived.
    assert looks <= seconds + 2.5
    # The look, the lease, the look of a part that works in the leader, and the announcement of the message.
    assert round_trips <= 3 * (looks + 1) + 1


def _looks(folder: Path) -> int:
    return (folder / "protocol").read_text().count('"BEGIN"')


def _round_trips(folder: Path) -> int:
    return sum("\tSync" in line or "\tQuery" in line for line in (folder / "protocol").read_text().splitlines())
