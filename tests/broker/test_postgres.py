"""The port on PostgreSQL: refusals, broken connections, restarts, forks, deadlines, and what a send costs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from psycopg import errors as pg

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase, Pool, reached_server
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidMessage,
    SendFailed,
)
from outbox.names import MAX_BODY_BYTES
from outbox.topic import Topic
from tests.broker.support import drain, end, half, message, new_sequencer, queued_ids, wire
from tests.broker.test_server_crashes import Server, server
from tests.support import eventually

__all__ = ["server"]


def test_a_topic_declared_later_is_found(broker: PostgresBroker, connection: BrokerConnection) -> None:
    broker.send([message()])
    declare_topics(Executor(connection, "outbox"), [Topic(name="new")])
    assert broker.send([message("new")])[0].position is not None


def test_a_topic_that_a_restore_took_away_takes_no_message(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    """The process still remembers the topic. No queue would get the message, and nothing would report it."""
    kept = message("plain")
    broker.send([message(), kept])
    # As in a dump from before the topic was created.
    connection.execute(
        "DELETE FROM outbox.queue WHERE topic_id IN (SELECT topic_id FROM outbox.topic WHERE name = 'orders')"
    )
    connection.execute("DELETE FROM outbox.topic WHERE name = 'orders'")
    ways: list[Callable[[], object]] = [
        lambda: broker.send([message()]),
        lambda: broker.send([message("plain"), message()]),
        lambda: broker.send([message(), message()]),
        lambda: broker.send_half(half()),
        lambda: broker.send_half(half(message("ordered", key="k"), message())),
    ]
    for way in ways:
        with pytest.raises(SendFailed, match="cannot be delivered"):
            way()
    run = Executor(connection, "outbox")
    for several in ([message()], [message("ordered", key="k"), message()]):
        with pytest.raises(pg.InvalidParameterValue, match="cannot be delivered"), connection.transaction():
            commit_log.append_decided(run, broker.catalog, several, transactional=True)
    assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (2,)
    assert broker.send([kept])[0].position is not None


def test_an_unreachable_server_fails_within_the_deadline() -> None:
    broker = PostgresBroker(BrokerDatabase("host=/nonexistent dbname=x"))
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        broker.send([message()], timeout_seconds=3.0)
    assert time.monotonic() - started < 3.5
    broker.close()


def test_a_bad_connection_string_or_schema_is_named() -> None:
    with pytest.raises(ConfigurationError, match="connection string"):
        BrokerDatabase("postgresql://[")
    with pytest.raises(ConfigurationError, match="schema 'A-b'"):
        BrokerDatabase("", schema="A-b")


def test_a_frozen_server_process_does_not_hold_a_sender_past_its_deadline(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    broker.send([message()])
    backend = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox'"
    ).fetchone()
    assert backend is not None
    os.kill(backend[0], signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="did not answer within the deadline"):
            broker.send([message()], timeout_seconds=1.0)
        assert time.monotonic() - started < 3
    finally:
        os.kill(backend[0], signal.SIGCONT)


def test_pg_terminate_backend_while_sending(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Once per send that came through, at any moment of the next ones: a send has three attempts."""
    sending = threading.Event()
    sending.set()
    came_through = threading.Event()
    kills = 0

    def terminate() -> None:
        nonlocal kills
        with contextlib.closing(database.open(name="terminator")) as own:
            while sending.is_set():
                came_through.wait()
                came_through.clear()
                own.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name = 'outbox'"
                )
                kills += 1

    thread = threading.Thread(target=terminate)
    thread.start()
    sent = []
    try:
        while kills < 30:
            batch = [message() for _ in range(3)]
            receipts = broker.send(batch)
            assert [receipt.message_id for receipt in receipts] == [one.message_id for one in batch]
            sent += batch
            came_through.set()
    finally:
        sending.clear()
        came_through.set()
        thread.join()
    drain(new_sequencer(database), connection)
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in sent)


def test_a_lost_acknowledgement_doubles_nothing(database: BrokerDatabase, connection: BrokerConnection) -> None:
    """The connection is cut after the statement was carried out and before its answer arrived."""
    cut: list[int] = []

    class Cut(BrokerConnection):
        def wait(self, gen: object, interval: float = 0.1, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            result = super().wait(gen, interval)  # type: ignore[arg-type, var-annotated]
            if (
                self.deadline is not None
                and len(cut) < 2
                and self.pgconn.status == 0
                and _stored(connection) > len(cut)
            ):
                cut.append(1)
                connection.execute("SELECT pg_terminate_backend(%s)", [self.info.backend_pid])
                super().close()
                raise BrokerUnavailable("the acknowledgement was lost")
            return result

    class CutDatabase(BrokerDatabase):
        def open(self, **kwargs: object) -> BrokerConnection:
            return Cut.connect(self.conninfo, autocommit=True)

    broker = PostgresBroker(CutDatabase(database.conninfo))
    one, transaction = message(), half()
    [receipt] = broker.send([one])
    broker.send_half(transaction)
    assert len(cut) == 2
    broker.end([end(transaction.transaction_id)])
    drain(new_sequencer(database), connection)
    assert sorted(queued_ids(connection)) == sorted([one.message_id, transaction.transaction_id])
    assert receipt.position is not None
    broker.close()


def _stored(connection: BrokerConnection) -> int:
    row = connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone()
    assert row is not None
    return int(row[0])


def test_a_forked_child_never_uses_its_parents_connections(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    broker.send([message()])
    before = _backends(connection)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            broker.send([message()])
            gc.collect()
            code = 0 if len(broker.send([message()])) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    broker.send([message()])
    assert _stored(connection) == 4
    assert before <= _backends(connection), "the parent's sessions are the same"


def _backends(connection: BrokerConnection) -> set[int]:
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox' AND datname = current_database()"
    )
    return {row[0] for row in rows}


def test_an_immediate_restart_of_the_server_while_sending(server: Server) -> None:
    database = server.database
    broker = PostgresBroker(database)
    broker.send([message()])
    sent: list[object] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            one = message()
            with contextlib.suppress(BrokerUnavailable, SendFailed):
                broker.send([one], timeout_seconds=5)
                sent.append(one.message_id)

    thread = threading.Thread(target=send)
    thread.start()
    eventually(lambda: len(sent) > 20)
    server.crash()
    server.start()
    count = len(sent)
    eventually(lambda: len(sent) > count + 20)
    stop.set()
    thread.join()
    broker.close()
    with contextlib.closing(database.open()) as connection:
        drain(new_sequencer(database), connection)
        found = queued_ids(connection)
    assert len(found) == len(set(found))
    assert set(sent) <= set(found), "nothing acknowledged is lost"


def test_identity_distinguishes_databases(database: BrokerDatabase, server_url: str) -> None:
    with database.connect() as one, database.connect() as same, BrokerDatabase(server_url).connect() as other:
        assert reached_server(one) == reached_server(same) != reached_server(other)


def test_every_send_is_one_round_trip_and_one_statement(database: BrokerDatabase, connection: BrokerConnection) -> None:
    catalog = TopicCatalog()
    catalog.get(connection, "orders")

    def cost(action: object) -> tuple[int, int]:
        assert callable(action)
        action()
        with wire(connection) as recorded:
            action()
        return recorded.round_trips, recorded.statements

    single = lambda: commit_log.append_decided(Executor(connection, "outbox"), catalog, [message()])  # noqa: E731
    bulk = lambda: commit_log.append_decided(Executor(connection, "outbox"), catalog, [message() for _ in range(500)])  # noqa: E731
    one_half = lambda: commit_log.append_half(Executor(connection, "outbox"), catalog, half())  # noqa: E731
    assert [cost(action) for action in (single, bulk, one_half)] == [(1, 1)] * 3


def test_wal_bytes_per_message(broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection) -> None:
    """Stored, decided and queued in batches of 500: at most 850 bytes of WAL for a body of 260."""
    sequencer = new_sequencer(database)
    bodies = [b"x" * 260] * 500

    def send_and_queue() -> None:
        broker.send([message(body=body) for body in bodies])
        drain(sequencer, connection)

    send_and_queue()
    connection.execute("CHECKPOINT")
    # The first change of a page after a checkpoint writes the whole page; what counts is the steady state.
    send_and_queue()
    before = _wal(connection)
    for _ in range(6):
        send_and_queue()
    per_message = (_wal(connection) - before) / 3000
    assert per_message < 850, f"{per_message:.0f} bytes"


def _wal(connection: BrokerConnection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])


def test_a_half_message_of_another_transaction_is_refused(broker: PostgresBroker) -> None:
    """The message would be decided with the first transaction, not with the second one."""
    first, second = message(), message()
    broker.send_half(half(first, second))
    broker.send_half(half(first, second))
    with pytest.raises(InvalidMessage, match="belongs to transaction"):
        broker.send_half(half(second))


def test_a_call_whose_bodies_are_too_large_for_one_statement_is_refused(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    body = bytes(MAX_BODY_BYTES)
    with pytest.raises(InvalidMessage, match=r"bodies of 541,065,216 bytes, .* with several calls"):
        broker.send([message(body=body) for _ in range(129)])
    assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (0,)


# -- the producer's pool of connections --


def test_a_connection_is_kept_for_the_next_call(server_url: str) -> None:
    pool = Pool(BrokerDatabase(server_url))
    first = pool.lend(time.monotonic() + 60, lambda connection: connection)
    assert pool.lend(time.monotonic() + 60, lambda connection: connection) is first
    pool.close()
    assert first.closed


def test_what_is_given_back_to_a_closed_pool_is_closed(server_url: str) -> None:
    """Like a thread that was in the middle of a call."""
    pool = Pool(BrokerDatabase(server_url))

    def close_the_pool(connection: BrokerConnection) -> BrokerConnection:
        pool.close()
        assert not connection.closed
        return connection

    assert pool.lend(time.monotonic() + 60, close_the_pool).closed
    assert pool.lend(time.monotonic() + 60, lambda connection: connection).closed
