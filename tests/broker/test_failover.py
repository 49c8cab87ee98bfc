"""The primary dies and its synchronous standby takes over, while producers, the sequencer and consumers live on."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.leading import Sequencer
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message
from outbox.ports import call_handler
from outbox.subscription import Mode, Subscription
from tests.broker.bench import TABLES
from tests.broker.inbox import InboxInvoker
from tests.broker.support import assert_gapless, process
from tests.broker.test_server_crashes import Server, consuming, server
from tests.broker.traffic import Effects, Traffic, assert_took_effect
from tests.spark.replica import streaming
from tests.support import eventually

__all__ = ["server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def standby(server: Server) -> Iterator[str]:
    """The URL of a standby that every commit of the server waits for, but those that wait for no disk either."""
    # Not under pytest's folder: another run of pytest, as it starts, closes that to the server's user.
    made = tempfile.TemporaryDirectory(prefix="outbox-replica-", ignore_cleanup_errors=True)
    with made as folder, streaming(server.database.conninfo, Path(folder)) as url:
        with psycopg.connect(server.database.conninfo, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'walreceiver'")
            connection.execute("SELECT pg_reload_conf()")
            eventually(lambda: _one(connection, "SELECT sync_state FROM pg_stat_replication") == "sync")
        yield url


def _one(connection: psycopg.Connection[tuple[object, ...]], query: str) -> object:
    row = connection.execute(query).fetchone()
    return row and row[0]


@contextlib.contextmanager
def _lagging(standby: str) -> Iterator[None]:
    """The standby receives nothing."""
    with psycopg.connect(standby, autocommit=True) as connection:
        pid = int(str(_one(connection, "SELECT pid FROM pg_stat_wal_receiver")))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_tick_is_seen_once_the_standby_has_it(server: Server, standby: str) -> None:
    broker = PostgresBroker(server.database)
    sequencer = Sequencer(server.database, uuid4())
    with contextlib.closing(server.database.open()) as ticking, contextlib.closing(server.database.open()) as looking:
        sequencer.run_once(ticking)
        broker.send([Message(topic="orders", body=b"{}")])
        before = server.heads()
        thread = threading.Thread(target=sequencer.run_once, args=(ticking,))
        waits = f"SELECT wait_event FROM pg_stat_activity WHERE pid = {ticking.info.backend_pid}"
        with _lagging(standby):
            thread.start()
            eventually(lambda: _one(looking, waits) == "SyncRep")
            assert server.heads() == before
        thread.join(timeout=60)
        assert server.heads() != before
    broker.close()


def test_the_promoted_standby_loses_and_invents_nothing(server: Server, standby: str, new_database: object) -> None:
    """All processes have both addresses; the writable server is the broker."""
    hosts = [str(conninfo_to_dict(url)["host"]) for url in (server.database.conninfo, standby)]
    address = make_conninfo(
        server.database.conninfo, host=",".join(hosts), port="5432,5432", target_session_attrs="read-write"
    )
    database = BrokerDatabase(address)
    assert callable(new_database)
    urls = {"here": address, "elsewhere": new_database()}
    for url in urls.values():
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLES)
    inboxes = {name: InboxInvoker(url, idle_seconds=0) for name, url in urls.items()}
    seen: list[str] = []
    groups = {name: Effects(name, inboxes.get(name), seen) for name in ("bare", "here", "elsewhere", "all")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(database))
        for name, handler in groups.items():
            subscription = Subscription(
                topic="ordered", group=name, broadcast=name == "all", mode=Mode.KEY_ORDERED, suspend_seconds=0.05
            )
            stack.enter_context(consuming(database, subscription, handler, inboxes.get(name, call_handler)))
        with Traffic(database) as traffic:
            eventually(lambda: len(seen) >= 200, within_seconds=120)
            server.crash()
            with psycopg.connect(standby, autocommit=True) as connection:
                assert _one(connection, "SELECT pg_promote()") is True
            reached = len(seen) + 200
            eventually(lambda: len(seen) >= reached, within_seconds=120)
        with contextlib.closing(database.open()) as connection:
            traffic.check_back(connection)
        assert_took_effect(traffic, groups, urls)
        with contextlib.closing(database.open()) as connection:
            assert_gapless(connection)
    for inbox in inboxes.values():
        inbox.close()
